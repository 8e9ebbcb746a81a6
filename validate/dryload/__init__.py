"""The dry load, as keepmtp sees it: vLLM's own classes and loaders, for a GPU that is not there."""
