"""At which tensor-parallel sizes vLLM loads weights: each rank must get whole heads, and whole
groups or blocks of what is packed.

In: the language model's config, and a `Cut` for each kind of weight, with the name of one such
tensor. Out: sizes, in words too, or why one is refused.

Easy to get wrong: modules like o_proj are cut along their inputs, where groups are; others along
their outputs, where only blocks are. With expert parallelism a rank has whole routed experts, but
still a part of shared ones. Keys are not cut finer than by their heads. And NVFP4's dense modules
load without a word where a rank's part ends within a group, and then have other groups' scales.

Source: vLLM 0.32.0 and 0.33.0 config/model.py (verify_with_parallel_config), distributed/utils.py
(divide), compressed_tensors_moe_wna16.py, kernels/linear/mixed_precision/marlin.py, fp8_utils.py
(validate_fp8_block_shape); tests/vllm/test_tensor_parallel.py compares with both.
"""

from collections.abc import Mapping
from typing import NamedTuple

from .family_view import Place
from .frozen import Raw, Shape
from .schemes import SCHEMES

SIZES = (1, 2, 4, 8)
WHOLE_EXPERTS = "--enable-expert-parallel"
"""vLLM's option with which a rank has whole routed experts."""
_HEADS = ("num_attention_heads", "linear_num_value_heads", "linear_num_key_heads")
_CUT = ("attention", "linear_attention", "dense_mlp", "shared_experts", "experts")
# Every rank has all of these.
_UNCUT = (
    "fused_qkv_a_proj",
    "fused_qkv_a_g_proj",
    "fused_wqa_wkv",
    "kv_a_proj_with_mqa",
    "index_q_proj",
    "index_k_proj",
)
_BY_INPUTS = ("o_proj", "out_proj", "down_proj", "dense", "w2", "w2_weight", "wo_b", "wo_ud")
_BY_KEYS = ("k_proj", "v_proj")
_FINER = {"W4A16": "W4A16_G32"}


class Split(NamedTuple):
    """So many ranks, each with a part of every weight, or with whole routed experts."""

    size: int = 1
    whole_experts: bool = False


class Cut(NamedTuple):
    """A kind of weight that ranks cut.

    Attributes:
        is_routed: of routed experts.
        leaf: the last part of its name in vLLM, and on disk for routed experts.
        is_of_keys: it has rows for each head of keys or values.
        shape: rows and columns.
        group: columns under a scale; 1 where a rank may have any number.
        block: rows under a scale, likewise.
        scheme: with the same bytes; "" if none.
    """

    is_routed: bool
    leaf: str
    is_of_keys: bool
    shape: Shape
    group: int
    block: int
    scheme: str


class NoCut(NamedTuple):
    """Why ranks cannot get their parts: the tensor, or the key of config.json, and the numbers."""

    where: str
    says: str


Cuts = Mapping[Cut, str]


def cut_of(
    place: Place,
    shape: Shape,
    group: int | None = None,
    block: tuple[int, int] | None = None,
    scheme: str = "",
) -> Cut | None:
    """A weight as ranks cut it; None where each has all of it."""
    on_disk = place.row.path.rpartition(".")[2]
    is_routed = place.role == "experts"
    leaf = on_disk
    if not is_routed:
        leaf = place.runtime.rpartition(".")[2]
    if place.role not in _CUT or {leaf, on_disk} & {*_UNCUT} or len(shape) < 2:
        return None
    rows, columns = shape[-2:]
    rows //= max(1, len(place.row.stacked))
    block_rows, block_columns = 1, max(1, group or 1)
    if block:
        block_rows, block_columns = block
    return Cut(
        is_routed, leaf, on_disk in _BY_KEYS, (rows, columns), block_columns, block_rows, scheme
    )


def why_not(config: Raw, cuts: Cuts, split: Split) -> NoCut | None:
    """Why vLLM refuses to load it so; None where it loads."""
    size = split.size
    for key in _HEADS:
        count = config.get(key)
        if isinstance(count, int) and count % size:
            return NoCut(f"config.json: {key}", f"{count} are no multiple of {size}")
    for cut, name in cuts.items():
        if size == 1 or (cut.is_routed and split.whole_experts):
            continue
        side, unit, what = cut.shape[0], cut.block, "rows"
        if cut.leaf in _BY_INPUTS:
            side, unit, what = cut.shape[1], cut.group, "columns"
        ranks = size
        if cut.is_of_keys:
            ranks = min(size, config.get("num_key_value_heads") or size)
        if side % (ranks * unit):
            each = f"a rank would get {side / ranks:g} of its {side:,} {what}"
            return NoCut(name, f"{each}, no multiple of the {unit} under a scale")
    return None


def sizes_of(config: Raw, cuts: Cuts, *, whole_experts: bool = False) -> tuple[int, ...]:
    """The sizes of SIZES at which it loads."""
    sizes = list[int]()
    for size in SIZES:
        if why_not(config, cuts, Split(size, whole_experts)) is None:
            sizes.append(size)
    return tuple(sizes)


def in_words(config: Raw, cuts: Cuts) -> str:
    """The sizes at which it loads, and the ways to others: "loads at TP 1, 2; at 4 with
    W4A16_G32".
    """
    sizes = sizes_of(config, cuts)
    finer = dict[Cut, str]()
    for cut, name in cuts.items():
        scheme = _FINER.get(cut.scheme)
        if scheme:
            cut = cut._replace(group=SCHEMES[scheme].group_size or 1)
        finer[cut] = name
    ways = {
        WHOLE_EXPERTS: sizes_of(config, cuts, whole_experts=True),
        " or ".join(_FINER.values()): sizes_of(config, finer),
    }
    by_sizes = dict[str, list[str]]()
    for way, possible in ways.items():
        further = ", ".join([str(size) for size in possible if size not in sizes])
        if further:
            by_sizes.setdefault(further, []).append(way)
    said = f"loads at TP {', '.join(map(str, sizes))}"
    for further, names in by_sizes.items():
        said += f"; at {further} with {' or '.join(names)}"
    return said
