"""How close a served checkpoint is to its served source, on held-out text and without a benchmark."""
