"""How fast a checkpoint is served with and without drafting: `vllm bench serve` for each k and each load."""
