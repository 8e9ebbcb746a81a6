"""What the writer and the calibration share: processes, ranks, progress, statistics."""
