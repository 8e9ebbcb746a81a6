"""Fixes of tensors and of the index: other names, other shapes, other dtypes for the same bytes; no value changes.

In: a `Checked`, and the proposal that its tensors are in. Out: changes of tensors, or of what the index lists.

Easy to get wrong: a shard has one header, so one renamed scale means that its whole shard is written again. And a shape
may be changed only if it has as many elements: two global scales are not one.
"""

from collections.abc import Iterator, Mapping
from math import prod

from ..checkpoints.safetensors_file import Entry
from ..recipes.family import HFName
from ..validate.check.check import Checked
from ..validate.check.dialects.choose import quantization_of
from ..validate.check.rules_kv import draft_takes, is_kv_scale
from ..validate.check.runtime_view import Member, Module
from ..validate.check.vllm_module import VLLMModule
from .new_shards import NewTensor, as_it_was
from .proposal import CopyTensor, Edit, IndexAgain, IndexFile, Proposal, Retensor

_FIRST_SCALES = ("weight_scale", "weight_scale_inv", "scale")
_SCALARS = ("weight_global_scale", "input_global_scale", "weight_scale_2", "input_scale")
# Dtypes of the same width: what a weight or a scale must be -> what it may be stored as.
_VIEWS: Mapping[str, tuple[str, ...]] = {"F8_E4M3": ("U8", "I8"), "U8": ("F8_E8M0", "I8"), "F8_E8M0": ("U8",)}
_WEIGHTS = {
    "nvfp4": "U8",
    "nvfp4_modelopt": "U8",
    "mxfp4": "U8",
    "mxfp8": "F8_E4M3",
    "fp8_block": "F8_E4M3",
    "fp8_channel": "F8_E4M3",
    "fp8_tensor": "F8_E4M3",
}
_SCALES = {"nvfp4": "F8_E4M3", "nvfp4_modelopt": "F8_E4M3", "mxfp4": "U8", "mxfp8": "U8"}


def mtp_files_are_indexed(checked: Checked, proposal: Proposal) -> Iterator[Edit]:
    """Files with MTP tensors that the index does not list: F4, F9, R6."""
    runtime = checked.runtime
    if runtime is None:
        return
    for file in sorted({entry.file for entry in runtime.source.unindexed.values() if runtime.is_mtp_name(entry.name)}):
        yield IndexFile(file=file, why=f"vLLM reads the files that the index lists, and {file} has MTP tensors")


def index_is_written_again(checked: Checked, proposal: Proposal) -> Iterator[Edit]:
    """The index's total size is that of the tensors: R6."""
    yield IndexAgain(why="total_size is that of the tensors")


def copies_are_added(checked: Checked, proposal: Proposal) -> Iterator[Edit]:
    """Copies that older vLLM reads for the draft: E10. An index cannot give a tensor two names."""
    runtime = checked.runtime
    if runtime is None:
        return
    for index in sorted(runtime.found):
        for alias in runtime.view.family.aliases:
            name = HFName(runtime.view.mtp_stem(index) + alias.path)
            why = f"{alias.reason}; vLLM 0.32 takes the target's instead"
            yield CopyTensor(name=name, of=HFName(alias.source), why=why)


def mtp_names_lose_a_prefix(checked: Checked, proposal: Proposal) -> Iterator[Edit]:
    """MTP tensors under a vision-language model's prefix: F37."""
    runtime = checked.runtime
    if runtime is None:
        return
    for name, entry in runtime.source.entries.items():
        stem = runtime.view.mtp_stem(0).partition("layers.")[0] or "mtp."
        head, found, rest = name.partition("mtp.")
        is_nested = found and head in ("language_model.", "model.language_model.", "language_model.model.", "model.")
        if is_nested and not runtime.is_mtp_name(name):
            why = "the draft's loader does not strip the vision-language model's prefix"
            yield Retensor(name=name, new=_renamed(entry, f"{stem}{rest}"), why=why)


def kv_scales_leave(checked: Checked, proposal: Proposal) -> Iterator[Edit]:
    """Scales of the KV cache that the loader of the target or of the draft has no place for: F32."""
    runtime = checked.runtime
    if runtime is None:
        return
    loader = runtime.view.family.loader
    for entry in runtime.others:
        is_mtp = runtime.is_mtp_name(entry.name)
        is_taken = draft_takes(loader, entry.name) if is_mtp else loader.backbone_takes_kv_scales
        if is_kv_scale(entry.name.rpartition(".")[2]) and not is_taken:
            why = "vLLM's loader raises on this scale of the KV cache; without it the scale is 1"
            yield Retensor(name=entry.name, new=None, why=why)


def tensors_have_the_form_that_is_built(checked: Checked, proposal: Proposal) -> Iterator[Edit]:
    """Scales under another name, shapes with the same elements, bytes under another dtype: Fp1, Fp2, Fp5, F24, M3."""
    runtime = checked.runtime
    if runtime is None:
        return
    for module in runtime.modules:
        built = module.resolution.built
        if module.loads_quantized and not module.resolution.error and built.form not in ("plain", "unknown"):
            for member in module.members:
                yield from _in_form(module, member, built)


def orders_leave_the_draft(checked: Checked, proposal: Proposal) -> Iterator[Edit]:
    """GPTQ's g_idx in the MTP block, whose loader knows none; without desc_act it is the natural order."""
    runtime = checked.runtime
    if runtime is None or (quantization_of(runtime.source.config) or {}).get("desc_act"):
        return
    if not any(each.rule == "form" and each.where.endswith(".g_idx") for each in checked.data.findings):
        return
    for name in runtime.source.entries:
        if name.endswith(".g_idx") and runtime.is_mtp_name(name):
            why = "this draft's loader has no place for g_idx, which without desc_act is the natural order"
            yield Retensor(name=name, new=None, why=why)


def block_scales_are_f32(checked: Checked, proposal: Proposal) -> Iterator[Edit]:
    """Block scales in BF16, which F32 holds exactly: Fp2."""
    runtime = checked.runtime
    if runtime is None:
        return
    for module in runtime.modules:
        for member in module.members:
            scale = member.weight.parts.get("weight_scale")
            if module.resolution.built.form == "fp8_block" and scale is not None and scale.dtype == "BF16":
                new = NewTensor(name=scale.name, dtype="F32", shape=scale.shape, data=b"")
                why = "DeepGEMM asserts float32 scales; a BF16 number is a float32 number, so no value changes"
                yield Retensor(name=scale.name, new=new, why=why, convert=_widened)


def _in_form(module: Module, member: Member, built: VLLMModule) -> Iterator[Edit]:
    """One weight's tensors, in the form that vLLM builds."""
    weight = member.weight
    if weight.form == "plain" or built.form not in _WEIGHTS:
        return
    leaves = {built.renames.get(leaf, leaf): leaf for leaf in weight.parts}
    extra = sorted(set(leaves) - built.leaves - built.optional)
    missing = sorted(built.leaves - set(leaves))
    if len(extra) == len(missing) == 1 and {extra[0], missing[0]} <= set(_FIRST_SCALES):
        entry = weight.parts[leaves[extra[0]]]
        why = (
            f"vLLM's parameter is {missing[0]}; {extra[0]} has no place, and both are what the weight is multiplied by"
        )
        yield Retensor(name=entry.name, new=_renamed(entry, f"{weight.module}.{missing[0]}"), why=why)
        return
    if extra or missing:
        return
    for leaf, disk in leaves.items():
        entry = weight.parts[disk]
        dtype, shape = _dtype_of(built, leaf, entry), _shape_of(built, leaf, entry, weight.parts[_weight_leaf(leaves)])
        if (dtype, shape) != (entry.dtype, entry.shape):
            new = NewTensor(name=entry.name, dtype=dtype, shape=shape, data=b"")
            was, wanted = _words(entry.dtype, entry.shape), _words(dtype, shape)
            why = f"{leaf} is {was}, and vLLM builds {wanted}; the bytes stay"
            yield Retensor(name=entry.name, new=new, why=why)


def _dtype_of(built: VLLMModule, leaf: str, entry: Entry) -> str:
    """The dtype that the same bytes must have; the one they have, where another one needs other bytes."""
    table = _WEIGHTS if leaf in ("weight", "weight_packed") else _SCALES if leaf == "weight_scale" else {}
    wanted = table.get(built.form, entry.dtype)
    if built.form == "mxfp4" and built.renames:  # DeepSeek-V4's loaders take the bytes of E8M0 as they are
        return entry.dtype
    return wanted if entry.dtype in _VIEWS.get(wanted, ()) else entry.dtype


def _shape_of(built: VLLMModule, leaf: str, entry: Entry, weight: Entry) -> tuple[int, ...]:
    """The shape of a scale with as many elements as it has."""
    if leaf not in _FIRST_SCALES or len(weight.shape) != 2:
        is_one = leaf in _SCALARS and prod(entry.shape) == 1 and len(entry.shape) > 1
        return () if is_one else entry.shape
    if built.form == "fp8_tensor":
        return () if prod(entry.shape) == 1 and len(entry.shape) > 1 else entry.shape
    n = weight.shape[0]
    wanted: dict[int, tuple[int, ...]] = {}
    if built.form == "fp8_channel":
        wanted = {1: (n,), 2: (n, 1)}
    elif built.form == "fp8_block" and built.block:
        rows, columns = -(-n // built.block[0]), -(-weight.shape[1] // built.block[1])
        wanted = {2: (rows, columns), 4: (rows, 1, columns, 1)}
    shape = wanted.get(built.scale_ndim, entry.shape)
    return shape if prod(shape) == prod(entry.shape) else entry.shape


def _weight_leaf(leaves: Mapping[str, str]) -> str:
    return "weight_packed" if "weight_packed" in leaves else "weight"


def _renamed(entry: Entry, name: str) -> NewTensor:
    new = as_it_was(entry)
    return NewTensor(name=HFName(name), dtype=new.dtype, shape=new.shape, data=b"")


def _words(dtype: str, shape: tuple[int, ...]) -> str:
    if not shape:
        return f"{dtype}, one number"
    return f"{dtype} of {len(shape)} dimension{'s' if len(shape) > 1 else ''}"


def _widened(data: bytes) -> bytes:
    """BF16 as F32: its bytes are the upper half."""
    found = bytearray(2 * len(data))
    found[2::4], found[3::4] = data[0::2], data[1::2]
    return bytes(found)
