"""Functions that are looked at while they do what they did."""

from typing import Any

import pytest


def calls_of(patch: pytest.MonkeyPatch, owner: Any, name: str) -> list[tuple[tuple, Any]]:
    """Arguments and result of each call from now on, of a function in a module or a class."""
    calls: list[tuple[tuple, Any]] = []
    original = getattr(owner, name)

    def spied(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        calls.append((args, result))
        return result

    patch.setattr(owner, name, spied)
    return calls
