"""What a server has room for once the weights are on its GPUs: the longest sequence, and how many,
by the number of drafts.

In: a family's view of a config.json, the bytes of target and draft, a GPU's memory. Out: a `Room`
for each number of drafts.

Easy to get wrong: a block has the same bytes in every group of layers. So a draft of one layer
takes a layer's bytes from each group, and a block of attention is as large as a state of linear
attention.

Source: vLLM 0.32.0 v1/core/kv_cache_utils.py, v1/kv_cache_interface.py, platforms/interface.py
(_align_hybrid_block_size), layers/mamba/mamba_utils.py; tests/vllm/test_caches.py compares both.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import ceil
from typing import Any

from ...recipes.errors import size_in_words
from ...recipes.family_view import FamilyView
from ...recipes.frozen import Raw, frozen
from ..plan.step_reads import MOST_DRAFTS

SHARE = 0.92
"""Of a GPU's memory, by default: vLLM 0.32.0 config/cache.py (gpu_memory_utilization)."""
OWN_BYTES = 4 * 2**30
"""Assumed, not counted: activations of vLLM's trial run, CUDA graphs, what CUDA and NCCL keep."""
ASSUMED = f"vLLM needs {size_in_words(OWN_BYTES)} more for activations, CUDA graphs and libraries"
USUAL_TOKENS = 32768
IN_FLIGHT = 2 * 8192
"""Tokens of two batches, whose blocks are not freed yet: a server's own size of them on an H100 or
H200, vLLM 0.32.0 engine/arg_utils.py.
"""
_KINDS = {
    "1": "sliding",
    "sliding_attention": "sliding",
    "M": "linear",
    "mamba": "linear",
    "-": "",
    "E": "",
    "mlp": "",
    "moe": "",
}
_KEYS = ("hybrid_override_pattern", "layers_block_type", "hybrid_layer_pattern", "layer_types")
# What says how large a state of linear attention is: its heads, their width, the rows of a state,
# how many keys have as many, the kernel of the convolution; the bytes of a number; and how many
# states of a prompt are kept.
_STATES = (
    (
        (
            "linear_num_value_heads",
            "linear_value_head_dim",
            "linear_key_head_dim",
            "linear_num_key_heads",
            "linear_conv_kernel_dim",
        ),
        2,
        0,
    ),
    (("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel"), 4, 1),
    (("num_heads", "head_dim", "head_dim", "num_heads", "short_conv_kernel_size"), 4, 1),
    (
        (
            "num_attention_heads",
            "head_dim",
            "head_dim",
            "num_attention_heads",
            "short_conv_kernel_size",
        ),
        4,
        0,
    ),
    (("num_attention_heads", "head_dim", "head_dim"), 2, 0),
)


@frozen
class Cache:
    """What one layer keeps on one GPU.

    Attributes:
        tokens, num_bytes: of a block.
        window: tokens that are kept; 0 for all.
        states: blocks of a sequence, however long; 0 where `tokens` say it.
    """

    tokens: int
    num_bytes: int
    window: int = 0
    states: int = 0


@frozen
class Room:
    """What there is room for.

    Attributes:
        drafts: tokens drafted a step.
        weights: bytes of target and draft on each GPU.
        cache: bytes that are left there.
        target, draft: bytes of the cache for each further token of a long sequence, on each GPU.
        longest: tokens of a sequence alone, at most what the model takes.
        length, sequences: how many sequences of so many tokens fit at once.
    """

    drafts: int
    weights: int
    cache: int
    target: int
    draft: int
    longest: int
    length: int
    sequences: float


def weights_of(view: FamilyView, tensors: Iterable[Any]) -> tuple[int, int]:
    """Bytes of the target, and of what a draft adds to it; `tensors` are entries, or outputs of a
    plan.
    """
    target = draft = 0
    for tensor in tensors:
        place = view.place(tensor.name)
        if place is None or place.part == "backbone":
            target += tensor.num_bytes
        elif place.role not in ("embedding", "head") or place.row.is_drafts_own:
            draft += tensor.num_bytes  # other drafts get the target's
    return target, draft


def fits(
    view: FamilyView,
    weights: Sequence[int],
    memory: int,
    *,
    tp: int = 1,
    length: int = 0,
    share: float = SHARE,
    width: int = 2,
) -> list[Room]:
    """For no draft to MOST_DRAFTS; nothing where that is not counted.

    Args:
        view: of the checkpoint.
        weights: bytes of the target, and of what a draft adds.
        memory: bytes of one GPU.
        tp: GPUs that split both.
        length: tokens of the sequences that are counted; by default USUAL_TOKENS, or what the model
            takes.
        share: of the memory that vLLM may take.
        width: bytes of a number in the cache.
    """
    if not _is_counted(view):
        return []
    most = view.number("max_position_embeddings") or USUAL_TOKENS
    length = length or min(USUAL_TOKENS, most)
    found = []
    for drafts in range(MOST_DRAFTS + 1):
        target, draft = caches(view, drafts, tp=tp, width=width)
        layers = target + draft
        needed = ceil(sum(weights[: 1 + bool(drafts)]) / tp)
        left = max(0, int(share * memory) - OWN_BYTES - needed)
        fit = Room(
            drafts=drafts,
            weights=needed,
            cache=left,
            target=_a_token(target),
            draft=_a_token(draft),
            longest=bisect_left(
                range(1, most + 1), x=True, key=lambda n: sequences(layers, left, n) < 1
            ),
            length=length,
            sequences=sequences(layers, left, length),
        )
        found.append(fit)
    return found


def in_words(found: Sequence[Room], drafts: int) -> str:
    """What there is room for, drafting so many tokens a step."""
    fit = found[min(drafts, MOST_DRAFTS)]
    return (
        f"{fit.longest:,} tokens in one sequence, or {int(fit.sequences):,} sequences of "
        f"{fit.length:,} at once (without drafts {int(found[0].sequences):,})"
    )


def sequences(
    layers: Sequence[Cache], num_bytes: int, length: int, in_flight: int = IN_FLIGHT
) -> float:
    """How many sequences of so many tokens fit into so many bytes: vLLM's maximum concurrency."""
    if not any(layer.window or layer.states for layer in layers):  # all have one table of blocks
        a_block = sum(layer.num_bytes for layer in layers)
        return num_bytes // a_block / ceil(length / layers[0].tokens)
    page = max(layer.num_bytes for layer in layers)
    kinds = Counter[Cache]()
    for layer in layers:
        tokens = layer.tokens * (page // layer.num_bytes)
        kinds[replace(layer, num_bytes=page, tokens=tokens)] += 1
    size = min(kinds.values())
    if max(kinds.values()) < 1.5 * size:
        size = max(kinds.values())
    most = needed = 0
    for kind, count in kinds.items():
        groups = ceil(count / size)
        most = max(most, ceil(count / groups))
        kept = length
        if kind.window:
            kept = min(kind.window - 1 + in_flight, length)
        blocks = kind.states or ceil(kept / kind.tokens) + bool(kind.window)
        needed += groups * blocks
    return num_bytes // (most * page) / needed


def caches(
    view: FamilyView, drafts: int, *, tp: int = 1, width: int = 2, block: int = 16
) -> tuple[list[Cache], list[Cache]]:
    """The layers of the target that keep something, and those of the draft.

    Args:
        view: of the checkpoint.
        drafts: tokens drafted a step.
        tp: GPUs that split it.
        width: bytes of a number.
        block: tokens of a block, where nothing makes it larger.
    """
    config = view.text_config
    kinds = Counter(_kinds(view))
    full = _attention(view, tp, width, block)
    own = {key.removeprefix("swa_"): config[key] for key in config if key.startswith("swa_")}
    sliding = _attention(_with(view, own), tp, width, block)
    sliding = replace(sliding, window=view.number("sliding_window"))
    state = full
    if kinds["linear"]:
        state = _state(view, full, tp, drafts)
        full = replace(state, states=0)
    target = [full] * (kinds["full"] * _attentions(view))
    target += [sliding] * kinds["sliding"] + [state] * kinds["linear"]
    draft = [sliding if kinds["sliding"] else full] * bool(drafts)
    if _has_indexer(view):  # a key in FP8, and its scale
        index = replace(full, num_bytes=full.tokens * (view.number("index_head_dim") + 4))
        target += [index] * config.get("indexer_types", ["full"] * view.num_layers).count("full")
        draft += [index] * len(draft)
    return target, draft


def _a_token(layers: Sequence[Cache]) -> int:
    long = [layer for layer in layers if not (layer.window or layer.states)]
    return sum(layer.num_bytes // layer.tokens for layer in long)


def _is_counted(view: FamilyView) -> bool:
    """Whether its attention is grouped-query, sliding, linear, or latent, also with an indexer in
    each layer or in those that config.json names.
    """
    kinds = {*_kinds(view)}
    is_latent = bool(view.number("kv_lora_rank"))
    if "full" not in kinds or not _attentions(view) or not _attention(view, 1, 2, 1).num_bytes:
        return False
    if _has_indexer(view):
        skips = view.text_config.get("index_topk_pattern") or view.number("index_topk_freq") > 1
        return is_latent and kinds == {"full"} and not skips
    if "linear" in kinds:
        return _state_sizes(view) is not None
    return not (is_latent and "sliding" in kinds)


def _attentions(view: FamilyView) -> int:
    """Attentions of a layer; 0 for a kind that is not counted."""
    leaves = Counter(row.path.rpartition(".")[2] for row in view.family.block)
    return leaves["kv_b_proj"] or leaves["k_proj"]


def _has_indexer(view: FamilyView) -> bool:
    return any("index" in row.path for row in view.family.block)


def _kinds(view: FamilyView) -> list[str]:
    """What each layer has: full, sliding or linear attention, or none."""
    named = next(filter(None, map(view.text_config.get, _KEYS)), "0" * view.num_layers)
    kinds = [_KINDS.get(str(kind), "full") for kind in named[: view.num_layers]]
    every = view.number("full_attention_interval") or 1
    for index in range(len(kinds)):
        if index in view.linear_layers or (index + 1) % every:
            kinds[index] = "linear"
    return kinds


def _with(view: FamilyView, own: Raw) -> FamilyView:
    """With other keys of config.json."""
    return FamilyView(view.family, {**view.text_config, **own})


def _attention(view: FamilyView, tp: int, width: int, block: int) -> Cache:
    """A layer that keeps keys and values of every token, or one vector for both."""
    a_token = (view.number("kv_lora_rank") + view.number("qk_rope_head_dim")) * width
    if not view.number("kv_lora_rank"):
        heads = view.number("num_key_value_heads", "num_attention_groups")
        queries = view.number("num_attention_heads") or 1
        size = view.number("head_dim") or view.number("hidden_size") // queries
        a_token = max(1, heads // tp) * (size + (view.number("v_head_dim") or size)) * width
    elif view.number("index_topk"):
        block = 64
        if width == 1:  # fp8_ds_mla has scales, and what is rotated in BF16
            a_token = 656
    return Cache(tokens=block, num_bytes=block * a_token)


def _state_sizes(view: FamilyView) -> tuple[tuple[int, ...], int, int] | None:
    """The row of _STATES whose keys config.json has, with what it says."""
    inner = _with(view, view.text_config.get("linear_attn_config") or {})
    for keys, width, kept in _STATES:
        sizes = tuple([inner.number(key) for key in keys])
        if all(sizes):
            return sizes, width, kept
    return None


def _state(view: FamilyView, full: Cache, tp: int, drafts: int) -> Cache:
    """A layer of linear attention, in the smallest block of attention that holds a state."""
    found = _state_sizes(view)
    assert found is not None, "only what is counted is asked"
    (heads, size, rows, *conv), width, kept = found
    if view.text_config.get("mamba_ssm_dtype") == "float32":
        width = 4
    num_bytes = heads * size * rows * width
    if conv:
        groups, kernel = conv
        num_bytes += (heads * size + 2 * groups * rows) * (kernel - 1 + drafts) * 2
    step = full.tokens
    if view.number("kv_lora_rank"):
        step = 128
    a_token = full.num_bytes // full.tokens
    tokens = step * ceil(num_bytes / tp / (step * a_token))
    # With prefix caching, which is on: the last state, the one before, and one for each draft.
    return Cache(tokens=tokens, num_bytes=tokens * a_token, states=2 + drafts + kept)
