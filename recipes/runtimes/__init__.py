"""What servers call things, and which of their versions do so, as data."""

from typing import Literal

Runtime = Literal["vllm", "sglang"]
"""A server, whose reading of a checkpoint something is about."""
