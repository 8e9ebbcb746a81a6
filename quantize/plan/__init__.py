"""One decision for each tensor, taken from headers before any work."""
