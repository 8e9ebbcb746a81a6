"""Dry load: vLLM's own classes and loaders judge a checkpoint on meta tensors, for a GPU that is not there.

Runs in vLLM's environment, never in keepmtp's process: `..loader` starts `server.main` with vLLM's Python and speaks
JSON lines with it. Nothing here imports keepmtp.

Reading order: server (jobs in, answers out), stages (one checkpoint), account (what was written, from what),
demands (what must be), kernels (what vLLM would run), then the pretence itself: gpu, cuda, stubs, world.
"""
