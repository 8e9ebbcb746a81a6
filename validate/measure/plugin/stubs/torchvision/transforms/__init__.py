"""Names that transformers imports."""

import enum

from . import functional, v2

__all__ = ["InterpolationMode", "functional", "v2"]


class InterpolationMode(enum.Enum):
    """Members are read when transformers is imported."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"
