"""The dry load: vLLM's own classes and loaders, for a GPU that is not there."""
