"""Rows that many families share: attention, MLP and expert modules.

In: paths of modules on disk. Out: rows of a family table. Runtime names are those of vLLM 0.32.0
(`packed_modules_mapping` of the model classes, model_executor/models/*).

Easy to get wrong: a file with a leading underscore is not a family (`families.families`).
"""

from dataclasses import replace

from ..family import Layout, Role, Row, Stem

EH_PROJ_IS_NN_LINEAR = "vLLM builds eh_proj as a plain nn.Linear, which has no slot for scales"
ROUTER = "routing decides which experts run; vLLM builds the gate without a quantization config"
NORM = "a vector"
EMBEDDING = "shared between target and draft"
HEAD = "shared between target and draft; its logits decide acceptance"


def fused(runtime: str, *paths: str, role: Role) -> tuple[Row, ...]:
    """Rows of the modules `paths`, which vLLM fuses in this order into the module `runtime`."""
    return tuple(Row(path=path, role=role, runtime=runtime, shares=runtime) for path in paths)


def plain(role: Role, *paths: str) -> tuple[Row, ...]:
    """Rows of modules that have the same name in vLLM as on disk."""
    return tuple(Row(path=path, role=role) for path in paths)


def kept(role: Role, reason: str, *paths: str, loads_quantized: bool = False) -> tuple[Row, ...]:
    """Rows of modules that no recipe quantizes; mostly vLLM has no slots for their scales."""
    return tuple(
        Row(path=path, role=role, why_kept=reason, loads_quantized=loads_quantized)
        for path in paths
    )


def gated_mlp(stem: str, role: Role) -> tuple[Row, ...]:
    """`stem`.{gate,up,down}_proj with gate and up fused."""
    gate_up = fused(f"{stem}.gate_up_proj", f"{stem}.gate_proj", f"{stem}.up_proj", role=role)
    return gate_up + plain(role, f"{stem}.down_proj")


def routed_experts(
    stem: str,
    gate: str = "gate_proj",
    up: str = "up_proj",
    down: str = "down_proj",
    *,
    aliases: bool = False,
) -> tuple[Row, ...]:
    """`stem`.{e}.<gate|up|down>: in vLLM one RoutedExperts module, with one global scale for w13 of
    each expert.

    With `aliases`, the rows also have the names gate_proj, up_proj and down_proj: vLLM before 0.32
    asked for those, even if the checkpoint had other names.
    """
    w13 = f"{stem}.{{e}}.w13"
    other = {gate: "gate_proj", up: "up_proj", down: "down_proj"} if aliases else {}
    return tuple(
        Row(
            path=f"{stem}.{{e}}.{name}", role="experts", runtime=stem, shares=w13 if name != down else "",
            aliases=(f"{stem}.{{e}}.{other[name]}",) if name in other else (),
        )
        for name in (gate, up, down)
    )  # fmt: skip


def nested(parent: str, rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """The same rows for a block that is under `parent` on disk and directly under the stem in
    vLLM.
    """
    return tuple(
        replace(
            row, path=parent + row.path, runtime=row.runtime or row.path, shares=row.shares and parent + row.shares,
            aliases=(row.path, *row.aliases) if "{e}" in row.path else row.aliases,
        )
        for row in rows
    )  # fmt: skip


GQA = (
    *fused(
        "self_attn.qkv_proj",
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        role="attention",
    ),
    *plain("attention", "self_attn.o_proj"),
    *kept("norm", NORM, "self_attn.q_norm", "self_attn.k_norm"),
)

# q_proj is not fused where the model has no q_lora_rank.
MLA = (
    *fused(
        "self_attn.fused_qkv_a_proj",
        "self_attn.q_a_proj",
        "self_attn.kv_a_proj_with_mqa",
        role="attention",
    ),
    *plain(
        "attention",
        "self_attn.q_proj",
        "self_attn.q_b_proj",
        "self_attn.kv_b_proj",
        "self_attn.o_proj",
    ),
    *kept("norm", NORM, "self_attn.q_a_layernorm", "self_attn.kv_a_layernorm"),
)

# The sparse-attention indexer of DeepSeek-V3.2 and GLM-5.
INDEXER = (
    *kept("indexer", "vLLM builds wk_weights_proj without a quantization config; its scores pick the keys to " "read",
          "self_attn.indexer.wk", "self_attn.indexer.weights_proj"),
    *kept("indexer", "its scores pick the keys to read", "self_attn.indexer.wq_b", loads_quantized=True),
    *kept("norm", NORM, "self_attn.indexer.k_norm"),
)  # fmt: skip

NORMS = kept("norm", NORM, "input_layernorm", "post_attention_layernorm")

# Dense and routed MLP of the DeepSeek-V3 line, as GLM-4.5 and later have it too.
DEEPSEEK_MLP = (
    *gated_mlp("mlp", "dense_mlp"),
    *routed_experts("mlp.experts"),
    *gated_mlp("mlp.shared_experts", "shared_experts"),
    *kept("router", ROUTER, "mlp.gate"),
)

# The layer that continues the decoder layers as MTP block. vLLM constructs the head as
# `model.layers.{N}.head`.
DEEPSEEK_MTP = (
    *kept("glue", EH_PROJ_IS_NN_LINEAR, "eh_proj"),
    *kept("norm", NORM, "enorm", "hnorm", "shared_head.norm"),
    *kept("embedding", EMBEDDING, "embed_tokens"),
    Row(path="shared_head.head", role="head", runtime="head", why_kept=HEAD),
)

TOP = (
    *kept("embedding", EMBEDDING, "model.embed_tokens"),
    *kept("head", HEAD, "lm_head", loads_quantized=True),
    *kept("norm", NORM, "model.norm"),
)

# The usual layout: MTP layers continue the decoder layers.
INLINED = {
    "*": Layout(
        layers=Stem(disk="model.layers.{i}.", runtime="model.layers.{i}."), mtp=None, top=TOP
    )
}
