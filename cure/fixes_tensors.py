"""Fixes of tensors and of the index: other names, other shapes, other dtypes for the same bytes; no
value changes.

In: a `Faulty`. Out: changes of tensors, or of what the index lists.

Easy to get wrong: a shard has one header, so one renamed scale means that its whole shard is
written again. And a shape may be changed only if it has as many elements: two global scales are not
one.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import prod

from ..checkpoints.safetensors_file import Entry
from ..recipes.family import HFName
from ..validate.check.dialects.choose import quantization_of
from ..validate.check.rules_kv import draft_takes, is_kv_scale
from ..validate.check.runtime_view import Member
from ..validate.check.vllm_module import VLLMModule
from .new_shards import as_it_was
from .proposal import Faulty

_FIRST_SCALES = ("weight_scale", "weight_scale_inv", "scale")
_SCALARS = ("weight_global_scale", "input_global_scale", "weight_scale_2", "input_scale")
# Dtypes of the same width: what a weight or a scale must be -> what it may be stored as.
_VIEWS: Mapping[str, tuple[str, ...]] = {
    "F8_E4M3": ("U8", "I8"),
    "U8": ("F8_E8M0", "I8"),
    "F8_E8M0": ("U8",),
}
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
_PREFIXES = ("language_model.", "model.language_model.", "language_model.model.", "model.")


def mtp_files_are_indexed(faulty: Faulty) -> None:
    """Files with MTP tensors that the index does not list: F4, F9, R6."""
    for name, entry in sorted(faulty.runtime.source.unindexed.items()):
        if faulty.runtime.is_mtp_name(name):
            faulty.proposal.index(
                entry.file, f"vLLM reads what the index lists, and {entry.file} has MTP tensors"
            )


def index_is_written_again(faulty: Faulty) -> None:
    """The index's total size is that of the tensors: R6."""
    faulty.proposal.index_again("total_size is that of the tensors")


def copies_are_added(faulty: Faulty) -> None:
    """Copies that older vLLM reads for the draft: E10. An index cannot give a tensor two names."""
    view = faulty.runtime.view
    for index in sorted(faulty.runtime.found):
        for alias in view.family.aliases:
            name = HFName(view.mtp_stem(index) + alias.path)
            faulty.proposal.copy_tensor(
                name, HFName(alias.source), f"{alias.reason}; vLLM 0.32 takes the target's"
            )


def mtp_names_lose_a_prefix(faulty: Faulty) -> None:
    """MTP tensors under a vision-language model's prefix: F37."""
    stem = faulty.runtime.view.mtp_stem(0).partition("layers.")[0] or "mtp."
    for name, entry in faulty.runtime.source.entries.items():
        head, found, rest = name.partition("mtp.")
        if found and head in _PREFIXES and not faulty.runtime.is_mtp_name(name):
            why = "the draft's loader does not strip the vision-language model's prefix"
            faulty.proposal.retensor(
                entry, replace(as_it_was(entry), name=HFName(f"{stem}{rest}")), why
            )


def kv_scales_leave(faulty: Faulty) -> None:
    """Scales of the KV cache that the loader of the target or of the draft has no place for:
    F32.
    """
    runtime, loader = faulty.runtime, faulty.runtime.view.family.loader
    for entry in runtime.others:
        is_mtp = runtime.is_mtp_name(entry.name)
        is_taken = draft_takes(loader, entry.name) if is_mtp else loader.backbone_takes_kv_scales
        if is_kv_scale(entry.name.rpartition(".")[2]) and not is_taken:
            why = "vLLM's loader raises on this scale of the KV cache; without it the scale is 1"
            faulty.proposal.retensor(entry, None, why)


def orders_leave_the_draft(faulty: Faulty) -> None:
    """GPTQ's g_idx in the MTP block, whose loader knows none; without desc_act it is the natural
    order.
    """
    runtime = faulty.runtime
    is_found = any(
        each.rule == "form" and each.where.endswith(".g_idx") for each in faulty.findings
    )
    if is_found and not (quantization_of(runtime.source.config) or {}).get("desc_act"):
        for name, entry in runtime.source.entries.items():
            if name.endswith(".g_idx") and runtime.is_mtp_name(name):
                why = (
                    "this draft's loader has no place for g_idx, which without desc_act is the "
                    "natural order"
                )
                faulty.proposal.retensor(entry, None, why)


def block_scales_are_f32(faulty: Faulty) -> None:
    """Block scales in BF16, which F32 holds exactly: Fp2."""
    for module in faulty.runtime.modules:
        for member in module.members:
            scale = member.weight.parts.get("weight_scale")
            if (
                module.resolution.built.form == "fp8_block"
                and scale is not None
                and scale.dtype == "BF16"
            ):
                why = (
                    "DeepGEMM asserts float32 scales; a BF16 number is a float32 number, so no "
                    "value changes"
                )
                faulty.proposal.retensor(
                    scale, replace(as_it_was(scale), dtype="F32"), why, _widened
                )


def tensors_have_the_form_that_is_built(faulty: Faulty) -> None:
    """Scales under another name, shapes with the same elements, bytes under another dtype: Fp1,
    Fp2, Fp5, F24, M3.
    """
    for module in faulty.runtime.modules:
        built = module.resolution.built
        if module.loads_quantized and not module.resolution.error and built.form in _WEIGHTS:
            for member in module.members:
                if member.weight.form != "plain":
                    _in_form(faulty, member, built)


def _in_form(faulty: Faulty, member: Member, built: VLLMModule) -> None:
    """One weight's tensors, in the form that vLLM builds."""
    parts = {built.renames.get(leaf, leaf): entry for leaf, entry in member.weight.parts.items()}
    extra, missing = parts.keys() - built.leaves - built.optional, built.leaves - parts.keys()
    if len(extra) == len(missing) == 1 and extra | missing <= {*_FIRST_SCALES}:
        (had,), (wanted,) = extra, missing
        why = (
            f"vLLM's parameter is {wanted}; {had} has no place, and both are what the weight is "
            "multiplied by"
        )
        new = replace(as_it_was(parts[had]), name=HFName(f"{member.weight.module}.{wanted}"))
        faulty.proposal.retensor(parts[had], new, why)
    elif not extra and not missing:
        weight = parts.get("weight_packed") or parts["weight"]
        for leaf, entry in parts.items():
            dtype, shape = _dtype_of(built, leaf, entry), _shape_of(built, leaf, entry, weight)
            if (dtype, shape) != (entry.dtype, entry.shape):
                why = f"vLLM builds {leaf} as {dtype} of {len(shape)} dimensions; the bytes stay"
                new = replace(as_it_was(entry), dtype=dtype, shape=shape)
                faulty.proposal.retensor(entry, new, why)


def _dtype_of(built: VLLMModule, leaf: str, entry: Entry) -> str:
    """The dtype that the same bytes must have; the one they have, where another one needs other
    bytes.
    """
    if built.form == "mxfp4" and built.renames:
        return entry.dtype  # DeepSeek-V4's loaders take the bytes of E8M0 as they are
    tables = {"weight": _WEIGHTS, "weight_packed": _WEIGHTS, "weight_scale": _SCALES}
    wanted = tables.get(leaf, {}).get(built.form, "")
    return wanted if entry.dtype in _VIEWS.get(wanted, ()) else entry.dtype


def _shape_of(built: VLLMModule, leaf: str, entry: Entry, weight: Entry) -> tuple[int, ...]:
    """The shape of a scale with as many elements as it has."""
    wanted: dict[int, tuple[int, ...]] = {}
    is_scale = leaf in _FIRST_SCALES and len(weight.shape) == 2
    if leaf in _SCALARS or (is_scale and built.form == "fp8_tensor"):
        wanted = {built.scale_ndim: () if len(entry.shape) > 1 else entry.shape}
    elif is_scale and built.form == "fp8_channel":
        wanted = {1: weight.shape[:1], 2: (weight.shape[0], 1)}
    elif is_scale and built.form == "fp8_block" and built.block:
        rows, columns = (
            -(-size // side) for size, side in zip(weight.shape, built.block, strict=True)
        )
        wanted = {2: (rows, columns), 4: (rows, 1, columns, 1)}
    shape = wanted.get(built.scale_ndim, entry.shape)
    return shape if prod(shape) == prod(entry.shape) else entry.shape


def _widened(data: bytes) -> bytes:
    """BF16 as F32: its bytes are the upper half."""
    found = bytearray(2 * len(data))
    found[2::4], found[3::4] = data[0::2], data[1::2]
    return bytes(found)
