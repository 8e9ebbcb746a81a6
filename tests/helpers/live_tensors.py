"""What a folder's tensors are, byte for byte, and checkpoints without their MTP block."""

from pathlib import Path

from checkpoint_files import Checkpoint
from keepmtp.checkpoints.source import open_source
from keepmtp.recipes.families import find_view

Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]
"""Dtype, shape and bytes by name."""


def tensors_of(folder: Path) -> Tensors:
    found = {}
    for entry in open_source(folder).entries.values():
        with open(folder / entry.file, "rb") as file:
            file.seek(entry.start)
            found[entry.name] = (entry.dtype, tuple(entry.shape), file.read(entry.num_bytes))
    return found


def without_block(checkpoint: Checkpoint) -> Checkpoint:
    """Headers alone, without the tensors of the MTP block."""
    view = find_view(checkpoint.config, "built")
    checkpoint.tensors = {name: spec for name, spec in checkpoint.tensors.items() if not view.is_mtp(name)}
    return checkpoint
