"""Hooks on modules for as long as a context lasts."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


@contextmanager
def hooked(handles: Sequence[RemovableHandle]) -> Iterator[None]:
    """Removes the hooks of these handles at its end."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def hooked_before(
    hooks: Mapping[nn.Module, Callable[..., Any]], *, with_kwargs: bool = False
) -> AbstractContextManager[None]:
    """Each hook is called before the forward of its module."""
    handles = []
    for module, hook in hooks.items():
        handles.append(module.register_forward_pre_hook(hook, with_kwargs=with_kwargs))
    return hooked(handles)


def modules_of(model: nn.Module, names: Iterable[str]) -> dict[str, Any]:
    """Modules by their paths in the model."""
    return {name: model.get_submodule(name) for name in names}


def input_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """What a linear layer is handed, by position or by name."""
    if args:
        return args[0]
    return next(iter(kwargs.values()))
