"""Calibration text: datasets, tokens and batches."""
