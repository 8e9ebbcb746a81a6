"""Names that transformers imports."""

from . import functional

__all__ = ["functional"]
