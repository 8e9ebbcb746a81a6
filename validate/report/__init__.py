"""report.json, its page and the model card: what was measured of one checkpoint, and whether it is
good enough.
"""
