"""What vLLM builds for a module, for each way of writing a quantization config."""
