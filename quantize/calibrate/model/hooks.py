"""Hooks on modules for as long as a context lasts."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor, nn
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


def hooked_before(
    hooks: Mapping[nn.Module, Callable[..., Any]], *, with_kwargs: bool = False
) -> AbstractContextManager[None]:
    """Each hook is called before the forward of its module."""
    return hooked(
        module.register_forward_pre_hook(hook, with_kwargs=with_kwargs)
        for module, hook in hooks.items()
    )


def modules_of(model: nn.Module, names: Iterable[str]) -> dict[str, Any]:
    """Modules by their paths in the model."""
    return {name: model.get_submodule(name) for name in names}


def input_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """What a linear layer is handed, by position or by name."""
    (value, *_) = (*args, *kwargs.values())
    return value
