"""The quantization config of a checkpoint, in either dialect, in the server's runtime names."""
