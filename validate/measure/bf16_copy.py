"""A BF16 copy of a quantized checkpoint, for CPUs that have no kernel for it: the same weights, MTP
block included.

In: a local `Source` in any stored form. Out: a folder with the same shards, dequantized one at a
time, config.json without its quantization config, and the tokenizer.

Easy to get wrong: such a copy has the rounding of the weights and nothing else of the original. It
tries no kernel, no quantized activations and no quantization config, so a checkpoint with a wrong
ignore list is served as a good one. `keepmtp check` and the dry load find those faults.
"""

import json
import shutil
from collections import defaultdict
from pathlib import Path

from ...checkpoints.companions import inside
from ...checkpoints.dialects.choose import without_quantization
from ...checkpoints.files import refuse_small_disk, within
from ...checkpoints.safetensors_file import Entry, total_bytes
from ...checkpoints.source import INDEX, Source
from ...checkpoints.stored import (
    KV_SCALE_LEAVES,
    StoredWeight,
    stored_weights,
)
from ...recipes.errors import CheckpointError
from ...recipes.forms import NOT_COMPUTED, TRANSPOSED
from ...recipes.schemes import num_bytes
from ..facts.vllm_env import VLLM

_NO_LINEARS = ("fp8_block", "mxfp4", "mxfp8", "NVFP4A16")


def why_no_kernel(source: Source, vllm: VLLM) -> str:
    """Why this vLLM cannot serve the checkpoint as it is: "" on a GPU, and where its CPU build has
    kernels.

    Native on a CPU: W4A16 linears with AVX-512, FP8 and INT8 linears, NVFP4 linears by emulation.
    Source: vLLM 0.32.0 model_executor/kernels/linear/__init__.py, layers/fused_moe/oracle; tried on
    real servers.
    """
    missing = set[str]()
    if vllm.build != "cpu":
        return ""
    for weight in stored_weights(source.entries.values())[0].values():
        scheme = weight.scheme or weight.form
        if weight.form in ("plain", *TRANSPOSED):
            continue
        if ".experts." in weight.module:
            missing.add(f"routed experts in {scheme}")
        elif weight.form == "int_packed" and "avx512f" not in vllm.cpu_features:
            missing.add(f"{scheme} without AVX-512")
        elif weight.form in _NO_LINEARS or scheme in _NO_LINEARS:
            missing.add(f"linears in {scheme}")
    if not missing:
        return ""
    return f"vLLM's CPU build has no kernel for {', '.join(sorted(missing))} on this machine"


def write_copy(source: Source, folder: Path) -> Path:
    """Write the copy; memory is a shard of it.

    Args:
        source: a local checkpoint.
        folder: must not exist.

    Returns: `folder`.

    Raises:
        CheckpointError: a weight is stored in a form that cannot be read.
        RecipeError: too little room on the disk of `folder`.
    """
    # Here, so that a check needs no torch where nothing has to be copied.
    from safetensors.torch import save_file

    from ...checkpoints.dequantize import dequantize
    from ...checkpoints.values import read_parts, read_tensor

    assert source.folder is not None, "download() first"
    needed = refuse_full_disk(source, folder)
    shards: dict[str, list[StoredWeight | Entry]] = defaultdict(list)
    for each in _held(source):
        shards[each.file if isinstance(each, Entry) else each.weight.file].append(each)
    folder.mkdir(parents=True)
    weight_map = {}
    for file, held in sorted(shards.items()):
        tensors = {}
        for each in held:
            if isinstance(each, Entry):
                tensors[each.name] = read_tensor(source, each)
            else:
                parts = read_parts(source, each.parts)
                where = f"{source.where}: {each.module}"
                shape = each.shape
                if "weight_shape" in parts:  # headers do not say how many bits integers have
                    shape = tuple(parts["weight_shape"].tolist())
                read = dequantize(each.form, parts, shape=shape, block=each.block, where=where)
                tensors[f"{each.module}.weight"] = read.contiguous()
        save_file(tensors, within(folder, file), metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    config = without_quantization(source.config)
    index = {"metadata": {"total_size": needed}, "weight_map": dict(sorted(weight_map.items()))}
    for name, content in ((INDEX, index), ("config.json", config)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    for name in source.companions:
        shutil.copyfile(inside(source.folder, name), within(folder, name))
    return folder


def refuse_full_disk(source: Source, folder: Path) -> int:
    """The bytes of a copy's weights, from headers alone, where the disk of `folder` has room for
    them.

    Raises:
        RecipeError: it has not.
        CheckpointError: a weight is stored in a form that cannot be read.
    """
    needed = 0
    for each in _held(source):
        if isinstance(each, Entry):
            needed += total_bytes([each])
        else:
            needed += num_bytes("BF16", each.shape)
    on_gpu = "serve it on a GPU, where no copy is needed"
    cure = f"A BF16 copy of {source.where} is served: choose another --out, or {on_gpu}"
    refuse_small_disk(folder, needed, cure=cure)
    return needed


def _held(source: Source) -> list[StoredWeight | Entry]:
    """Weights that become BF16, and entries that are carried over as they are.

    Raises:
        CheckpointError: a weight is stored in a form that cannot be read.
    """
    stored, others = stored_weights(source.entries.values())
    # Scales of the KV cache have no place in a model without a quantization config.
    kept = [entry for entry in others if entry.name.rpartition(".")[2] not in KV_SCALE_LEAVES]
    held: list[StoredWeight | Entry] = [*kept]
    for weight in stored.values():
        if weight.form == "plain":
            held.append(weight.weight)
            continue
        if weight.form in (*NOT_COMPUTED, "fp8_sliced"):
            raise CheckpointError(
                f"{source.where}: {weight.module}",
                "must lie in a form that can be dequantized",
                got=f"{', '.join(sorted(weight.parts))} in {weight.weight.dtype}",
                cure="Run `keepmtp check` on it, or serve it on a GPU",
            )
        held.append(weight)
    return held
