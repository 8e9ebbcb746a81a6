"""Real vLLM servers, started, asked and measured: acceptance, tasks, closeness and speed."""
