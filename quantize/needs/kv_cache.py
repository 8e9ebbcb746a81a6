"""Bytes of the KV cache that a token takes on each GPU: in the target, and in the draft.

In: a family's view of a config.json. Out: two numbers, or None where they are not counted.

Easy to get wrong: a window and a state of linear attention have their size however long a sequence
is. So only layers count that keep every token.

Source: vLLM 0.32.0 v1/kv_cache_interface.py (FullAttentionSpec, MLAAttentionSpec);
tests/vllm/test_caches.py compares both.
"""

from collections import Counter

from ...recipes.family_view import FamilyView

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


def kv_bytes(view: FamilyView, *, tp: int = 1, width: int = 2) -> tuple[int, int] | None:
    """What a token takes in the target, and what a draft adds.

    Args:
        view: of the checkpoint.
        tp: GPUs that split both.
        width: bytes of a number in the cache.
    """
    kinds = _kinds(view)
    a_layer = _a_layer(view, tp, width)
    # Attentions of a layer; none of a kind that is not counted.
    leaves = Counter(row.path.rpartition(".")[2] for row in view.family.block)
    target = a_layer * kinds.count("full") * (leaves["kv_b_proj"] or leaves["k_proj"])
    if not target:
        return None
    draft = a_layer
    if "sliding" in kinds:
        if view.number("kv_lora_rank"):
            return None
        draft = 0
    if any("index" in row.path for row in view.family.block):
        config = view.text_config
        skips = config.get("index_topk_pattern") or view.number("index_topk_freq") > 1
        if {*kinds} != {"full"} or skips or not view.number("kv_lora_rank"):
            return None
        index = view.number("index_head_dim") + 4  # a key in FP8, and its scale
        target += index * config.get("indexer_types", ["full"] * view.num_layers).count("full")
        draft += index
    return target, draft


def _kinds(view: FamilyView) -> list[str]:
    """What each layer has: full, sliding or linear attention, or none."""
    named = "0" * view.num_layers
    for key in reversed(_KEYS):  # the first that says something
        named = view.text_config.get(key) or named
    every = view.number("full_attention_interval") or 1
    kinds = list[str]()
    for index, kind in enumerate(named[: view.num_layers]):
        kinds.append(_KINDS.get(str(kind), "full"))
        if index in view.linear_layers or (index + 1) % every:
            kinds[index] = "linear"
    return kinds


def _a_layer(view: FamilyView, tp: int, width: int) -> int:
    """Of keys and values, or of the one vector for both."""
    if view.number("kv_lora_rank"):
        if width == 1 and view.number("index_topk"):
            return 656  # fp8_ds_mla has scales, and what is rotated in BF16
        return (view.number("kv_lora_rank") + view.number("qk_rope_head_dim")) * width
    heads = view.number("num_key_value_heads", "num_attention_groups")
    queries = view.number("num_attention_heads") or 1
    size = view.number("head_dim") or view.number("hidden_size") // queries
    return max(1, heads // tp) * (size + (view.number("v_head_dim") or size)) * width
