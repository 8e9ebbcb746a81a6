"""Values into stored tensors: a file for each format."""
