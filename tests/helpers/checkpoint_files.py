"""A checkpoint that is about to be written: config.json and headers, and the changes that break
one.

In: names, dtypes and shapes. Out: `Checkpoint`, `write`, `as_source`, and `Change`s to apply to
one.

Everything is headers: files are written with holes where the weights would be. Norms and scales of
one value are one half, so that what reads these alone finds nothing.
"""

import re
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data_files import put_json
from keepmtp.checkpoints.safetensors_file import Entry
from keepmtp.checkpoints.source import Source
from keepmtp.recipes.family import HFName
from keepmtp.recipes.schemes import SCHEMES, num_bytes
from layouts import Tensors
from releases import write_shard

INDEX = "model.safetensors.index.json"


@dataclass
class Checkpoint:
    """What is about to be written.

    Attributes:
        config: config.json.
        tensors: name -> dtype, shape.
        json_files: further JSON files.
        elsewhere: tensors for a file that the index does not list.
        index: changes the index before it is written.
        after: changes the folder once everything is written.
    """

    config: dict[str, Any]
    tensors: Tensors
    json_files: dict[str, Any] = field(default_factory=dict)
    elsewhere: Tensors = field(default_factory=dict)
    index: Callable[[dict[str, Any]], None] | None = None
    after: Callable[[Path], None] | None = None

    @property
    def quantization(self) -> dict[str, Any]:
        return self.config["quantization_config"]

    def take(self, pattern: str) -> Tensors:
        """Remove the tensors whose whole name matches, and return them; at least one must."""
        taken = {
            name: self.tensors.pop(name)
            for name in list(self.tensors)
            if re.fullmatch(pattern, name)
        }
        assert taken, pattern
        return taken

    def rename(self, pattern: str, replacement: str) -> None:
        for name, spec in self.take(pattern).items():
            self.tensors[re.sub(pattern, replacement, name)] = spec

    def retype(self, pattern: str, dtype: str | None = None, shape: "Shape | None" = None) -> None:
        for name, (old, size) in self.take(pattern).items():
            self.tensors[name] = (dtype or old, shape(*size) if shape else size)


Change = Callable[[Checkpoint], object]
Shape = Callable[..., tuple[int, ...]]


def write(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint's headers, in two shards and an index."""
    folder.mkdir(parents=True)
    names = list(checkpoint.tensors)
    halves = {
        "model-1.safetensors": names[: len(names) // 2],
        "model-2.safetensors": names[len(names) // 2 :],
    }
    for file, half in halves.items():
        write_shard(
            folder / file, {name: checkpoint.tensors[name] for name in half}, has_norms=True
        )
    if checkpoint.elsewhere:
        write_shard(folder / "mtp.safetensors", checkpoint.elsewhere, has_norms=True)
    index = {
        "metadata": {"total_size": sum(num_bytes(*spec) for spec in checkpoint.tensors.values())},
        "weight_map": {name: file for file, half in halves.items() for name in half},
    }
    if checkpoint.index:
        checkpoint.index(index)
    for file, content in {
        INDEX: index,
        "config.json": checkpoint.config,
        **checkpoint.json_files,
    }.items():
        put_json(folder / file, content)
    if checkpoint.after:
        checkpoint.after(folder)
    return folder


def write_single(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint's headers in one file, without an index."""
    folder.mkdir(parents=True)
    write_shard(folder / "model.safetensors", checkpoint.tensors, has_norms=True)
    put_json(folder / "config.json", checkpoint.config)
    return folder


def as_source(checkpoint: Checkpoint, folder: Path) -> Source:
    """The checkpoint as it would be opened, without writing it. `folder` is where JSON files are
    looked for.
    """
    entries, end = {}, 0
    for name, (dtype, shape) in checkpoint.tensors.items():
        size = num_bytes(dtype, shape)
        entries[HFName(name)] = Entry(
            name=HFName(name),
            file="model.safetensors",
            dtype=dtype,
            shape=shape,
            start=end,
            num_bytes=size,
        )
        end += size
    return Source(
        where="built",
        revision="local",
        folder=folder,
        config=checkpoint.config,
        entries=entries,
        unindexed={},
        companions=(),
    )


# --- changes --------------------------------------------------------------------------------------


def lose(pattern: str) -> Change:
    return lambda c: [*c.take(pattern)]


def setting(key: str, value: Any) -> Change:
    """Set a key of config.json, or of its text_config if it has one; None removes it."""

    def change(c: Checkpoint) -> None:
        holder = c.config if key in c.config else c.config.get("text_config", c.config)
        holder.pop(key, None)
        if value is not None:
            holder[key] = value

    return change


def ignoring(*entries: str, without: str = r"$^") -> Change:
    """Replace the ignore entries that match `without` by `entries`."""

    def change(c: Checkpoint) -> None:
        kept = [entry for entry in c.quantization["ignore"] if not re.search(without, entry)]
        assert len(kept) < len(c.quantization["ignore"]) or entries
        c.quantization["ignore"] = [*kept, *entries]

    return change


def pack(module: str, scheme: str) -> Change:
    """Store modules in a scheme's form although nothing says so."""

    def change(c: Checkpoint) -> None:
        for name, (_, shape) in c.take(rf"{module}\.weight").items():
            for spec in SCHEMES[scheme].tensors(*shape):
                c.tensors[f"{name.removesuffix('.weight')}.{spec.suffix}"] = (
                    spec.dtype,
                    spec.shape,
                )

    return change


def truncate(folder: Path) -> None:
    path = folder / "model-2.safetensors"
    with open(path, "rb+") as file:
        file.truncate(path.stat().st_size - 10)


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
