"""Cures of finished checkpoints: a new folder, and the old one stays as it is."""
