"""The upload of a checkpoint to the Hub."""
