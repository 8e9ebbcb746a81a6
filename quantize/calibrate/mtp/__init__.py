"""The MTP block's own pass: calibrated, measured, kept or tuned."""
