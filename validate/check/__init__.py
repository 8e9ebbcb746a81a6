"""The static check: from headers and values, will vLLM load this checkpoint with method=mtp."""
