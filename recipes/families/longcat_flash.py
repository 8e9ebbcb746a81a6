"""LongCat-Flash: two latent attentions, two dense MLPs and routed experts a layer, dense MTP under
`model.mtp`.

vLLM 0.32.0: model_executor/models/longcat_flash.py, longcat_flash_mtp.py. The draft is constructed
as `model.layers.{2 * num_layers}`, its eh_proj as just `eh_proj`. Its loader renames a fixed list
of names that end in `.weight` and `.weight_scale_inv`. It can load no scheme of compressed-tensors,
so the block stays plain.
"""

from dataclasses import replace

from ..family import Family, Layout, Loader, Renames, Row, Stem
from ._blocks import EMBEDDING, MLA, NORM, ROUTER, TOP, gated_mlp, kept, routed_experts

FIXED_NAMES = "vLLM's loader renames only .weight and .weight_scale_inv of the MTP block"


def _numbered(row: Row, module: str, index: int) -> Row:
    """The row of one of a layer's two attentions."""
    return replace(
        row,
        **{
            name: getattr(row, name).replace(module, f"{module}.{index}")
            for name in ("path", "runtime", "shares")
        },
    )


FAMILY = Family(
    model_type="longcat_flash",
    layouts={
        "*": Layout(
            layers=Stem(disk="model.layers.{i}.", runtime="model.layers.{i}."),
            mtp=Stem(disk="model.mtp.layers.{i}.", runtime="model.layers.{n}."),
            top=TOP,
            mtp_top=(
                Row(path="model.mtp.layers.0.eh_proj", role="glue", runtime="eh_proj", why_kept=FIXED_NAMES),
                Row(path="model.mtp.embed_tokens", role="embedding", runtime="model.embed_tokens", why_kept=EMBEDDING,
                    loads_quantized=False),
                *kept("norm", NORM, "model.mtp.norm"),
            ),
            draft_head="lm_head",
            renames=Renames(),
        ),
    },
    block=(
        *(_numbered(row, "self_attn", index) for index in (0, 1) for row in MLA),
        *(row for index in (0, 1) for row in gated_mlp(f"mlps.{index}", "dense_mlp")),
        *routed_experts("mlp.experts"),
        *kept("router", ROUTER, "mlp.router.classifier", "mlp.router"),
        *(row for index in (0, 1) for row in kept("norm", NORM, f"input_layernorm.{index}",
                                                  f"post_attention_layernorm.{index}")),
    ),
    mtp_block=(
        *(replace(row, why_kept=row.why_kept or FIXED_NAMES) for row in MLA),
        *(
            replace(row, path=f"transformer_layer.{row.path}", runtime=row.runtime or row.path, why_kept=FIXED_NAMES)
            for row in gated_mlp("mlp", "dense_mlp")
        ),
        *kept("norm", NORM, "enorm.m", "hnorm.m", "input_layernorm", "post_attention_layernorm"),
    ),
    num_layers_key="num_layers",
    layers_at_runtime=2,
    mtp_count_default=1,
    loader=Loader(backbone_takes_kv_scales=False, mtp_leaves=("weight", "weight_scale_inv")),
    no_draft="the block can only stay BF16, and transformers has no class for its dense layer",
    no_backbone="llm-compressor makes no single linears of its experts, some of which only pass their " "input on",
    notes="on disk model.mtp.layers.0, in vLLM model.layers.{2 * num_layers}; the block can only " "stay BF16",
)  # fmt: skip
