"""HOW: source, plan, pack, write. One file a station; `cli/pipeline.py` is the whole line on one screen."""
