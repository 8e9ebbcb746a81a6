"""A command to which something happens at one of its steps: it is killed, or its source changes."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import warm


def at(step: int, do: Callable[[], object]) -> Callable[[], None]:
    """The command, which does this when it comes to a file below an unfinished output for the
    step-th time.
    """
    left = [do, *[lambda: None] * (step - 1)]

    def at_event(event: str, arguments: tuple[object, ...]) -> None:
        if left and event.startswith(("open", "os.")) and ".out.partial/" in str(arguments[0]):
            left.pop()()

    def call() -> None:
        sys.addaudithook(at_event)
        warm.main()

    return call


def change(source: Path) -> None:
    """Write into its last shard."""
    with open(max(source.glob("*.safetensors")), "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x55")
    (source.parent / "changed").touch()
