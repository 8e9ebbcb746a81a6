"""The form of a value that is passed around: frozen, with slots, made by keywords alone.

In: a class with annotated fields. Out: the dataclass.

Easy to get wrong: a frozen value may hold a dict or a list that is not. Fields are tuples and
mappings.
"""

from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def frozen(cls: type[T]) -> type[T]:
    """`dataclass(frozen=True, slots=True, kw_only=True)`."""
    return dataclass(frozen=True, slots=True, kw_only=True)(cls)
