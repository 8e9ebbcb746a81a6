"""Cures of finished checkpoints: fix, graft and convert write a new folder, and the old one stays
as it is.
"""
