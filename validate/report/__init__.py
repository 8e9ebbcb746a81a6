"""report.json and its page: what was measured of one checkpoint, and whether it is good enough."""
