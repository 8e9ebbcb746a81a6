"""What somebody did to a checkpoint in the field: one function a kind of change.

In: names of tensors as expressions, places in JSON with levels apart by / (* for each key). Out: a
`Change`. `lose`, `ignoring` and `pack` are in checkpoint_files.py.
"""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

from checkpoint_files import Change, Checkpoint, truncate


def changed(build: Callable[[], Checkpoint], *changes: Change) -> Checkpoint:
    """A checkpoint after changes, made in order."""
    checkpoint = build()
    for change in changes:
        change(checkpoint)
    return checkpoint


def elsewhere(names: str) -> Change:
    """Tensors are in a file that the index does not list."""

    def change(checkpoint: Checkpoint) -> None:
        checkpoint.elsewhere = checkpoint.take(names)

    return change


def rename(names: str, replacement: str) -> Change:
    return lambda checkpoint: checkpoint.rename(names, replacement)


def retype(names: str, dtype: str) -> Change:
    return lambda checkpoint: checkpoint.retype(names, dtype)


def reshape(names: str, rule: str) -> Change:
    """Another shape: `n 1 -> n`."""
    old, new = (side.split() for side in rule.split("->"))

    def shape(*sizes: int) -> tuple[int, ...]:
        letters = dict(zip(old, sizes, strict=True))
        return tuple(letters.get(letter) or int(letter) for letter in new)

    return lambda checkpoint: checkpoint.retype(names, shape=shape)


def tensor(name: str, dtype: str, *shape: int) -> Change:
    """A tensor more, or one in another form."""
    return lambda checkpoint: checkpoint.tensors.update({name: (dtype, shape)})


def config(place: str, value: Any) -> Change:
    """A value in config.json; None removes the key."""
    return lambda checkpoint: put(checkpoint.config, place, value)


def quantization(place: str, value: Any) -> Change:
    """The same in its quantization_config."""
    return config(f"quantization_config/{place}", value)


def hf_quant_config(place: str, value: Any) -> Change:
    """The same in hf_quant_config.json."""
    return lambda checkpoint: put(
        checkpoint.json_files.setdefault("hf_quant_config.json", {}), place, value
    )


def indexed(name: str, file: str) -> Change:
    """An entry of the index that is not true."""

    def change(checkpoint: Checkpoint) -> None:
        checkpoint.index = lambda tree: tree["weight_map"].update({name: file})

    return change


def cut(checkpoint: Checkpoint) -> None:
    """The second file is cut short."""
    checkpoint.after = truncate


def put(tree: Any, place: str, value: Any) -> None:
    """Change what is at a place of a JSON tree."""
    key, _, rest = place.partition("/")
    keys = [key]
    if key == "*":
        keys = list(tree)
    for name in keys:
        if rest:
            put(tree[name], rest, value)
        elif value is None:
            del tree[name]
        else:
            tree[name] = deepcopy(value)
