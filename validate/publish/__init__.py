"""The model card, and the upload of a checkpoint to the Hub."""
