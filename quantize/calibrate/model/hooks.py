"""Hooks on modules for as long as a context lasts."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle


@contextmanager
def hooked(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Removes the hooks of these handles at its end."""
    kept = list(handles)
    try:
        yield
    finally:
        for handle in kept:
            handle.remove()


def input_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """What a linear layer is handed, by position or by name."""
    return args[0] if args else next(iter(kwargs.values()))
