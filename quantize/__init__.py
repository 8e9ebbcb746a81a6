"""HOW: plan, run, config, needs, pack, write, and calibrate, in this order. `pipeline.py` is the
line on one screen.
"""
