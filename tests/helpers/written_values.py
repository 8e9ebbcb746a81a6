"""Values for checkpoints that have only headers, single elements of them changed, what the tensors of
a folder are, and folders that lost their MTP block.

In: a folder from `checkpoint_files.write`. Out: the same folder; its scales, norms and weights are
like a model's.
"""

import random
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from checkpoint_files import Checkpoint
from commands import GLM
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from data_files import json_of, put_json
from keepmtp.checkpoints.dialects.runtime_view import RuntimeView
from keepmtp.checkpoints.safetensors_file import Entry
from keepmtp.checkpoints.source import INDEX, open_source
from keepmtp.checkpoints.values import TORCH_DTYPES, typed
from keepmtp.recipes.families import find_view
from keepmtp.recipes.family import HFName
from keepmtp.recipes.schemes import SCHEMES
from keepmtp.validate.check.reading import is_scale
from safetensors.torch import load_file, save_file
from torch import Tensor


def opened(folder: Path) -> RuntimeView:
    """The checkpoint as the value check reads it."""
    source = open_source(folder)
    return RuntimeView(source=source, view=find_view(source.config, str(folder)))


def fill(folder: Path, seed: int = 0) -> RuntimeView:
    """Write plausible values into every tensor; scales of fused modules agree."""
    runtime = opened(folder)
    generator = torch.Generator().manual_seed(seed)
    for entry in runtime.source.entries.values():
        _write(folder, entry, _values(runtime, entry, generator))
    return runtime


def poke(folder: Path, name: str, value: Any, *, at: int | slice = slice(None)) -> None:
    """Change elements of one tensor."""
    (entry,) = [entry for entry in open_source(folder).entries.values() if entry.name == name]
    raw = bytearray((folder / entry.file).read_bytes()[entry.start : entry.start + entry.num_bytes])
    values = typed(torch.frombuffer(raw, dtype=torch.uint8), entry.dtype, (-1,))
    values[at] = torch.tensor(value).to(values.dtype)
    _write(folder, entry, values)


def _write(folder: Path, entry: Entry, values: torch.Tensor) -> None:
    raw = values.contiguous().view(torch.uint8).numpy().tobytes() if entry.num_bytes else b""
    assert len(raw) == entry.num_bytes, entry
    overwrite(folder, entry, raw)


def overwrite(folder: Path, entry: Entry, raw: bytes) -> None:
    """Other bytes in a tensor's place, from its first one."""
    with open(folder / entry.file, "r+b") as file:
        file.seek(entry.start)
        file.write(raw)


def _values(runtime: RuntimeView, entry: Entry, generator: torch.Generator) -> torch.Tensor:
    dtype, size = TORCH_DTYPES[entry.dtype], (max(1, torch.Size(entry.shape).numel()),)
    leaf = entry.name.rpartition(".")[2]
    uniform = torch.rand(size, generator=generator)
    if is_scale(entry.name):
        if leaf in ("weight_global_scale", "weight_scale_2", "input_global_scale", "input_scale"):
            return torch.full(size, _common(runtime, entry, leaf)).to(dtype)
        if entry.dtype in ("U8", "F8_E8M0"):
            return (uniform * 20 + 105).to(torch.uint8)
        if entry.dtype == "F8_E4M3":
            return (uniform * 300 + 100).to(dtype)
        return (uniform * 1e-3 + 1e-4).to(dtype)
    if leaf == "qzeros" and runtime.given.raw.get("sym") is not False:
        # The middle less one, as the first version of GPTQ's files has it.
        weight = runtime.weights[HFName(entry.name.rpartition(".")[0])]
        code = 0x77777777
        if weight.shape[1] == 4 * weight.weight.shape[0]:
            code = 0x7F7F7F7F
        return torch.full(size, code, dtype=dtype)
    if dtype in (torch.uint8, torch.int8, torch.int32, torch.int64):
        return torch.randint(1, 100, size, generator=generator).to(dtype)
    if len(entry.shape) <= 1:
        return (uniform + 0.5).to(dtype)
    values = torch.randn(size, generator=generator)
    if len(entry.shape) == 2:  # what training leaves: a direction that chance does not have
        rows, columns = (torch.randn(side, generator=generator) for side in entry.shape)
        values += 0.3 * torch.outer(rows, columns).flatten()
    return (values * 0.02).to(dtype)


def _common(runtime: RuntimeView, entry: Entry, leaf: str) -> float:
    """One value for the parts of a fused module."""
    name = entry.name.rpartition(".")[0]
    place = runtime.placed.get(name)
    chance = random.Random(place.shares or name if place else name).uniform(1.0, 2.0)
    return chance * {"weight_scale_2": 1e-4, "input_scale": 1e-2}.get(leaf, 5000.0)


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


def decompressed(scheme: str, module: str, tensors: Mapping[str, Tensor]) -> Tensor:
    """A module's weight, BF16."""
    args = QuantizationScheme(targets=["Linear"], **SCHEMES[scheme].config_group())
    leaves = (spec.suffix for spec in SCHEMES[scheme].weight_tensors(128, 128))
    parts = {leaf: tensors[f"{module}.{leaf}"] for leaf in leaves}
    compressor = BaseCompressor.get_value_from_registry(SCHEMES[scheme].format)
    return compressor.decompress(parts, args)["weight"].bfloat16()


def fine_tune(folder: Path, *, has_block: bool) -> Path:
    """The shipped model as training code writes it: its config.json promises the block in any
    case.
    """
    tune = folder / "my-fine-tune"
    if has_block:
        return Path(shutil.copytree(GLM, tune))
    return drop_block(GLM, tune)


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
