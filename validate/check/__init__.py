"""The static check: from headers alone, will vLLM load this checkpoint with method=mtp."""
