"""A BF16 copy of a quantized checkpoint, for CPUs that have no kernel for it: the same weights, MTP block included.

In: a local `Source` in any stored form. Out: a folder with the same shards, dequantized a tensor at a time, config.json
without its quantization config, and the tokenizer.

Easy to get wrong: such a copy has the rounding of the weights and nothing else of the original. It tries no kernel, no
quantized activations and no quantization config, so a checkpoint with a wrong ignore list is served as a good one.
`keepmtp check` and the dry load find those faults.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ...checkpoints.companions import inside
from ...checkpoints.files import within
from ...checkpoints.safetensors_file import Entry, lay_out
from ...checkpoints.source import INDEX, Source, read
from ...checkpoints.stored import KV_SCALE_LEAVES, NOT_COMPUTED, StoredWeight, stored_weights
from ...recipes.errors import CheckpointError, VLLMError
from ...recipes.family import HFName
from ...recipes.schemes import num_bytes
from ..facts.vllm_env import VLLM

_COPY_BYTES = 32 * 2**20
# vLLM's words for a layer that it has no kernel for on this machine (0.32.0; measured on CPUs with and without AMX).
NO_KERNEL = (
    "Failed to find a kernel",
    "MoE backend supports",
    "MoE backend: NONE",
    "is not supported: Marlin",
    "is not divisible by weight quantization block",
)


def why_no_kernel(source: Source, vllm: VLLM) -> str:
    """Why this vLLM cannot serve the checkpoint as it is: "" on a GPU, and where its CPU build has kernels.

    Native on a CPU: W4A16 linears with AVX-512, FP8 and INT8 linears, NVFP4 linears by emulation.
    Source: vLLM 0.32.0 model_executor/kernels/linear/__init__.py, layers/fused_moe/oracle; tried on real servers.
    """
    if vllm.build != "cpu":
        return ""
    missing = sorted(
        {
            lack
            for weight in stored_weights(source.entries.values())[0].values()
            if (lack := _lack(weight, vllm.cpu_features))
        }
    )
    return f"vLLM's CPU build has no kernel for {', '.join(missing)} on this machine" if missing else ""


def _lack(weight: StoredWeight, features: tuple[str, ...]) -> str:
    if weight.form == "plain":
        return ""
    scheme = weight.scheme or weight.form
    if ".experts." in weight.module:
        return f"routed experts in {scheme}"
    if weight.form == "int_packed" and "avx512f" not in features:
        return f"{scheme} without AVX-512"
    return f"linears in {scheme}" if weight.form in ("fp8_block", "mxfp4", "mxfp8") or scheme == "NVFP4A16" else ""


def write_copy(source: Source, folder: Path) -> Path:
    """Write the copy; memory is the tensor in flight, twice.

    Args:
        source: a local checkpoint.
        folder: must not exist.

    Returns: `folder`.

    Raises:
        CheckpointError: a weight is stored in a form that cannot be read.
        VLLMError: too little room on the disk of `folder`.
    """
    assert source.folder is not None, "download() first"
    shards = _planned(source)
    needed = refuse_full_disk(source, folder)
    folder.mkdir(parents=True)
    for file, outputs in shards.items():
        _write_shard(source, within(folder, file), outputs)
    weight_map = {output.name: file for file, outputs in shards.items() for output in outputs}
    index = {"metadata": {"total_size": needed}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    (folder / "config.json").write_text(json.dumps(plain_config(source.config), indent=2) + "\n")
    for name in source.companions:
        shutil.copyfile(inside(source.folder, name), within(folder, name))
    return folder


def refuse_full_disk(source: Source, folder: Path) -> int:
    """The bytes of a copy's weights, from headers alone, where the disk of `folder` has room for them.

    Raises:
        VLLMError: it has not.
        CheckpointError: a weight is stored in a form that cannot be read.
    """
    outputs = (output for outputs in _planned(source).values() for output in outputs)
    needed = sum(num_bytes(output.dtype, output.shape) for output in outputs)
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    free = shutil.disk_usage(there).free
    if needed > free:
        raise VLLMError(
            folder,
            f"a BF16 copy of {source.where} needs {needed / 2**30:.1f} GiB of disk",
            got=f"{free / 2**30:.1f} GiB",
            cure="Choose another --out, or serve it on a GPU, where no copy is needed",
        )
    return needed


def plain_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json without its quantization config, wherever that is."""
    gone = ("quantization_config", "compression_config")
    plain = {key: value for key, value in config.items() if key not in gone}
    if isinstance(plain.get("text_config"), Mapping):
        plain["text_config"] = {key: value for key, value in plain["text_config"].items() if key not in gone}
    return plain


# --- shards -----------------------------------------------------------------------------------------------------------


class _Output(NamedTuple):
    """One tensor of the copy: an entry carried over as it is, or a stored weight that becomes BF16."""

    name: HFName
    dtype: str
    shape: tuple[int, ...]
    entry: Entry
    stored: StoredWeight | None = None


def _planned(source: Source) -> dict[str, list[_Output]]:
    """Outputs by file, in the order they are written: wider dtypes first, since readers map the file."""
    weights, others = stored_weights(source.entries.values())
    outputs = [_planned_weight(source.where, weight) for weight in weights.values()]
    # Scales of the KV cache have no place in a model without a quantization config.
    kept = [entry for entry in others if entry.name.rpartition(".")[2] not in KV_SCALE_LEAVES]
    outputs += [_Output(entry.name, entry.dtype, entry.shape, entry) for entry in kept]
    shards: dict[str, list[_Output]] = {}
    for output in sorted(outputs, key=lambda output: (output.entry.file, -num_bytes(output.dtype, (8,)))):
        shards.setdefault(output.entry.file, []).append(output)
    return shards


def _planned_weight(where: str, weight: StoredWeight) -> _Output:
    if weight.form == "plain":
        entry = weight.weight
        return _Output(entry.name, entry.dtype, entry.shape, entry)
    if weight.form in (*NOT_COMPUTED, "fp8_sliced"):
        raise CheckpointError(
            f"{where}: {weight.module}",
            "must lie in a form that can be dequantized",
            got=f"{', '.join(sorted(weight.parts))} in {weight.weight.dtype}",
            cure="Run `keepmtp check` on it",
        )
    if "weight_g_idx" in weight.parts or "weight_zero_point" in weight.parts:
        raise CheckpointError(
            f"{where}: {weight.module}",
            "zero points and group indices cannot be read",
            got=", ".join(sorted(weight.parts)),
            cure="Serve it on a GPU",
        )
    return _Output(HFName(f"{weight.module}.weight"), "BF16", weight.shape, weight.weight, weight)


def _write_shard(source: Source, path: Path, outputs: list[_Output]) -> None:
    layout = lay_out((output.name, output.dtype, output.shape) for output in outputs)
    with open(path, "wb") as file:
        file.write(layout.header)
        for output in outputs:
            file.writelines([_dequantized(source, output.stored)] if output.stored else _pieces(source, output.entry))


def _pieces(source: Source, entry: Entry) -> Iterator[memoryview]:
    for offset in range(0, entry.num_bytes, _COPY_BYTES):
        piece = memoryview(bytearray(min(_COPY_BYTES, entry.num_bytes - offset)))
        read(source, entry, piece, offset=offset)
        yield piece


def _dequantized(source: Source, stored: StoredWeight) -> memoryview:
    """One weight in BF16, as bytes."""
    import torch  # here, so that a check needs no torch where nothing has to be copied

    from ...checkpoints.dequantize import dequantize
    from ...checkpoints.values import read_tensor

    parts = {leaf: read_tensor(source, entry) for leaf, entry in stored.parts.items()}
    weight = dequantize(stored.form, parts, shape=stored.shape, block=stored.block)
    assert tuple(weight.shape) == stored.shape, f"{stored.module}: {tuple(weight.shape)}, planned {stored.shape}"
    return weight.contiguous().view(torch.uint8).reshape(-1).numpy().data
