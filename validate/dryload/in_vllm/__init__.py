"""Dry load: vLLM's own classes and loaders take a checkpoint as meta tensors, for a GPU that is not
there.

This runs in vLLM's environment, never in keepmtp's process: `..loader` starts `server.main` with
vLLM's Python and sends it JSON lines. Nothing here imports keepmtp.

Reading order: server (jobs in, answers out), stages (one checkpoint), account (what was written,
from what), demands (what must be written), kernels (what vLLM would run), then the pretended GPU:
gpu, cuda, stubs, world.
"""
