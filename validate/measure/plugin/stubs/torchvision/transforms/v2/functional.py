"""Names that transformers imports."""

from ..functional import pil_to_tensor, resize

__all__ = ["pil_to_tensor", "resize"]
