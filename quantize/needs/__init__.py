"""What a run needs: memory, disk and GPUs."""
