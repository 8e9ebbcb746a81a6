"""Stands in for torchvision in vLLM's environment: text models import its names and never call
them.

The package index has no CPU build of torchvision, and its CUDA build does not import without CUDA's
libraries.
"""

from . import io, transforms

__all__ = ["io", "transforms"]
__version__ = "0.28.0"
