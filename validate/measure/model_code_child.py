"""One of two processes that judge a program that a model wrote. `model_code.py` starts both with
this text.

In: which end of their link is its own: 0 runs the program, 1 runs the test, which comes on standard
input. Out: as exit status 0, where the test comes to its end.

Easy to get wrong: what runs in one process with the test can read it, or end the process as the
test would. So the program's process never sees the test, and all that it can say is a value,
written as Python writes it. A value of a class of its own could be equal to everything: only plain
ones cross. A name that the test does not know is a function of the program.
"""

import ast
import builtins
import os
import resource
import socket
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TextIO

_LIMITS = {"CORE": 0, "CPU": 3, "AS": 4 << 30, "FSIZE": 0, "NPROC": 0}
_LONGEST = 1 << 20  # characters of an answer; a parsed one takes a hundred times their memory
_KINDS: Mapping[type, type] = {list: list, tuple: tuple, set: set, frozenset: set}


class _Known(dict[str, Any]):
    """The test's names, and after them the program's."""

    def __init__(self, link: TextIO):
        super().__init__()
        self._link = link

    def __missing__(self, name: str) -> Callable[..., Any]:
        if hasattr(builtins, name):
            raise KeyError(name)
        return partial(self._call, name)

    def _call(self, name: str, *args: Any, **named: Any) -> Any:
        _say(self._link, (name, args, named))
        return ast.literal_eval(self._link.readline(_LONGEST))


def main(own_end: int) -> None:
    """Limits first; then this process's half."""
    for name, most in _LIMITS.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))
    link = socket.socket(fileno=os.dup(own_end)).makefile("rw")
    if own_end:
        os.dup2(2, own_end)  # what a test prints is no question
        exec(ast.literal_eval(sys.stdin.read()), _Known(link))  # noqa: S102 - this is what the file is for
    else:
        os.write(own_end, b"!")  # it has started
        os.dup2(1, own_end)  # nothing can be read
        names = dict[str, Any]()
        exec(ast.literal_eval(link.readline()), names)  # noqa: S102 - this is what the file is for
        for line in link:
            name, args, named = ast.literal_eval(line)
            _say(link, _plain(names[name](*args, **named)))


def _say(link: TextIO, value: object) -> None:
    link.write(f"{value!a}\n")
    link.flush()


def _plain(value: Any) -> Any:
    """The equal value of a built-in type, for one of numpy's or a defaultdict."""
    if isinstance(value, dict):
        return {_plain(key): _plain(each) for key, each in value.items()}
    for kind, plain in _KINDS.items():
        if isinstance(value, kind):
            return plain(map(_plain, value))
    return value.item() if hasattr(value, "item") else value


if __name__ == "__main__":
    main(int(sys.argv[1]))
