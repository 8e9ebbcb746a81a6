"""What a folder's tensors are, byte for byte, and checkpoints without their MTP block."""

import shutil
from pathlib import Path

from checkpoint_files import Checkpoint
from json_files import put_json
from keepmtp.checkpoints.source import INDEX, open_source
from keepmtp.recipes.families import find_view
from safetensors.torch import load_file, save_file

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
    checkpoint.tensors = {
        name: spec for name, spec in checkpoint.tensors.items() if not view.is_mtp(name)
    }
    return checkpoint


def drop_block(folder: Path, lost: Path) -> Path:
    """A copy without the tensors of the MTP block, as most tools leave it."""
    shutil.copytree(folder, lost)
    opened = open_source(folder)
    view = find_view(opened.config, folder)
    kept = {name: entry.file for name, entry in opened.entries.items() if not view.is_mtp(name)}
    for file in {entry.file for entry in opened.entries.values()}:
        tensors = {name: value for name, value in load_file(lost / file).items() if name in kept}
        (lost / file).unlink()
        if tensors:
            save_file(tensors, lost / file)
    put_json(lost / INDEX, {"metadata": {}, "weight_map": kept})
    return lost
