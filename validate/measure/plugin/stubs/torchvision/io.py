"""Names that transformers imports."""


class ImageReadMode:
    """Read in a default argument."""

    RGB = "RGB"


def decode_image(*_, **__):
    """Never called for text."""
    raise NotImplementedError
