"""A checkpoint that is about to be written: config.json and headers, and the changes that break
one.

In: names, dtypes and shapes. Out: `Checkpoint`, `write`, `as_source`, and `Change`s to apply to
one.

Everything is headers: files are written with holes where the weights would be. Norms and scales of
one value are one half, so that what reads these alone finds nothing.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from json_files import put_json
from keepmtp.checkpoints.safetensors_file import Entry
from keepmtp.checkpoints.source import Source
from keepmtp.recipes.family import HFName
from keepmtp.recipes.schemes import SCHEMES, num_bytes
from releases import write_shard
from tensors import Tensors

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
