"""The form of a value that is passed around: frozen, with slots, made by keywords alone; and the
types that every floor has a word for.

In: a class with annotated fields. Out: the dataclass.

Easy to get wrong: a frozen value may hold a dict or a list that is not. Fields are tuples and
mappings.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar, dataclass_transform

T = TypeVar("T")
Raw = Mapping[str, Any]
"""An object of a JSON or YAML file as it was read, such as config.json: it may be anybody's."""
Json = dict[str, Any]
"""An object that is being made for such a file, or for a call that takes its keys."""
Shape = tuple[int, ...]
Say = Callable[[str], None]
"""Gets a line that says what is done now."""
Advance = Callable[[int], None]
"""Gets the number of bytes that were read or written since the last call, from any thread."""

Bar = Callable[[int], AbstractContextManager[Advance]]
"""A progress bar: takes the number of bytes that there will be."""


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def frozen(cls: type[T]) -> type[T]:
    """`dataclass(frozen=True, slots=True, kw_only=True)`."""
    return dataclass(frozen=True, slots=True, kw_only=True)(cls)


def silent(doing: str) -> None:
    """A `Say` where nobody looks."""


def unwatched(num_bytes: int) -> AbstractContextManager[Advance]:
    """A `Bar` where nobody looks."""
    return nullcontext(nowhere)


def nowhere(num_bytes: int) -> None:
    """An `Advance` where nobody looks."""


def without(values: Mapping[str, T], *names: str) -> dict[str, T]:
    """A copy without some keys."""
    return {name: value for name, value in values.items() if name not in names}


def without_none(values: Raw) -> Json:
    """A copy without the keys that have no value."""
    return {name: value for name, value in values.items() if value is not None}
