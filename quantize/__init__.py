"""HOW: source, plan, pack, write. One file a station; `run.py` is the whole line on one screen."""
