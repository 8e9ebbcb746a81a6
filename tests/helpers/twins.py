"""Checkpoints broken on purpose that only a real server can tell from good ones."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from data_files import json_of, put_json
from safetensors.torch import load_file, save_file
from torch import Tensor


def broken(good: Path, folder: Path) -> Path:
    """The same bytes, but the BF16 MTP layer is claimed by the FP8 group: what an ignore list in
    wrong names does.
    """
    folder.mkdir()
    for path in good.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    config = json_of(folder / "config.json")
    quantization = config["quantization_config"]
    quantization["ignore"] = [entry for entry in quantization["ignore"] if "mtp" not in entry]
    for group in quantization["config_groups"].values():
        if group["weights"]["num_bits"] == 8:
            group["targets"].append(r"re:^mtp\.layers\.0\.")
    put_json(folder / "config.json", config)
    return folder


def noisy(good: Path, folder: Path, names: str, noise: Callable[[Tensor], Tensor]) -> Path:
    """A copy whose tensors of these names have noise on top, `noise` of a value as its deviation."""
    shutil.copytree(good, folder)
    generator = torch.Generator().manual_seed(0)
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        for name, tensor in tensors.items():
            if re.search(names, name):
                drawn = torch.randn(tensor.shape, generator=generator)
                value = tensor.float()
                tensors[name] = (value + drawn * noise(value)).to(tensor.dtype)
        save_file(tensors, path, metadata={"format": "pt"})
    return folder


def zeroed(good: Path, folder: Path, name: str, rows: list[int]) -> Path:
    """A copy in which these rows of a tensor are zero."""
    shutil.copytree(good, folder)
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        if name in tensors:
            tensors[name][rows] = 0
            save_file(tensors, path, metadata={"format": "pt"})
    return folder
