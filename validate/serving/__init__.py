"""Real vLLM servers: started, asked and measured, with and without method=mtp."""
