"""The value check: what the scales, the norms and the MTP block of a checkpoint hold, read from its bytes."""
