"""The dry load: vLLM's own classes and loaders, for a GPU that is not there; and what a serve log
says of a failure.
"""
