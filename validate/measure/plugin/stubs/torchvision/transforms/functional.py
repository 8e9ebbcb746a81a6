"""Names that transformers imports."""


def pil_to_tensor(*_, **__):
    """Never called for text."""
    raise NotImplementedError


def resize(*_, **__):
    """Never called for text."""
    raise NotImplementedError
