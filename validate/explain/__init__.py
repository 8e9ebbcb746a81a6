"""What vLLM does with a checkpoint, module group by module group, and what a serve log says of a failure."""
