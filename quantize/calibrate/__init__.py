"""Calibration: batches in, statistics for the writer out. `run.py` is the whole of it."""
