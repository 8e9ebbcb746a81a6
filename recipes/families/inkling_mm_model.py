"""Inkling: attention with short convolutions, experts stacked and interleaved on disk, dense MTP
blocks in BF16 only.

vLLM 0.32.0: models/inkling/nvidia/{model,attention,mlp,moe,mtp}.py. vLLM builds the draft's blocks
without a quantization config and cannot load quantized ones. It reads the target's packed experts
stacked, with rows of gate and up interleaved (`w13_weight.weight_packed`). keepmtp cannot write
that, so they stay BF16. The shared experts, which vLLM builds plain, stay BF16 too. Of the MTP
layers vLLM builds the first `num_speculative_tokens`, and skips the tensors of the others
(nvidia/mtp.py: _select_mtp_depth_count).
"""

from dataclasses import replace

from ..family import Family, Layout, Loader, Renames, Row, Stem
from ._blocks import EMBEDDING, HEAD, NORM, ROUTER, fused, kept, nested, plain

DRAFT = "vLLM builds Inkling's MTP blocks without a quantization config"
STACKED = (
    "vLLM reads packed experts of this family stacked and interleaved, which keepmtp does not write"
)
SINK = "vLLM builds the shared experts without a quantization config"
CONVOLUTION = "a convolution over time"
BLOCK = (
    *fused("attn.qkvr", "attn.wq_du", "attn.wk_dv", "attn.wv_dv", "attn.wr_du", role="attention"),
    *plain("attention", "attn.wo_ud"),
    *kept("norm", NORM, "attn.q_norm", "attn.k_norm", "attn_norm", "mlp_norm"),
    *kept("state", CONVOLUTION, "attn.k_sconv", "attn.v_sconv", "attn_sconv", "mlp_sconv"),
    *kept("state", "scores of relative positions", "attn.rel_logits_proj.proj"),
    Row(path="mlp.w13_dn", role="dense_mlp", runtime="mlp.gate_up_proj"),
    Row(path="mlp.w2_md", role="dense_mlp", runtime="mlp.down_proj"),
    Row(
        path="mlp.global_scale",
        role="state",
        why_kept="one number",
        loads_quantized=False,
        in_every_layer=False,
    ),
)

FAMILY = Family(
    model_type="inkling_mm_model",
    also=("inkling_model",),
    layouts={
        "*": Layout(
            layers=Stem(disk="model.llm.layers.{i}.", runtime="model.layers.{i}."),
            mtp=Stem(disk="model.mtp.layers.{i}.", runtime="model.layers.{i}."),
            top=(
                Row(path="model.llm.embed", role="embedding", runtime="model.embed_tokens", why_kept=EMBEDDING,
                    loads_quantized=False),
                Row(path="model.llm.unembed", role="head", runtime="lm_head", why_kept=HEAD),
                *kept("norm", NORM, "model.llm.embed_norm", "model.llm.norm"),
            ),
            mtp_top=kept("norm", NORM, "model.mtp.chain_norm"),
            opaque=(("model.visual.", "visual.vision_encoder.", "vision"), ("model.audio.", "audio.", "vision")),
            head="model.llm.unembed.weight",
            renames=Renames(
                substrings=((".w13_dn", ".gate_up_proj"), (".w2_md", ".down_proj")),
                prefixes=(
                    ("model.llm.layers.", "model.layers."), ("model.llm.embed_norm", "model.embed_norm"),
                    ("model.llm.embed", "model.embed_tokens"), ("model.llm.norm", "model.norm"),
                    ("model.llm.unembed", "lm_head"), ("language_model.layers.", "model.layers."),
                    ("language_model.lm_head.", "lm_head."), ("model.audio.", "audio."),
                    ("model.visual.", "visual.vision_encoder."),
                ),
            ),
        ),
    },
    block=(
        *BLOCK,
        *(replace(row, runtime="mlp.experts", loads_quantized=True)
          for row in kept("experts", STACKED, "mlp.experts.w13_weight", "mlp.experts.w2_weight")),
        *kept("shared_experts", SINK, "mlp.shared_experts.shared_w13_weight", "mlp.shared_experts.shared_w2_weight"),
        *kept("router", ROUTER, "mlp.gate", "mlp.gate.global_scale"),
    ),
    mtp_block=(
        *(replace(row, runtime=f"transformer_block.{row.runtime}", why_kept=row.why_kept or DRAFT,
                  loads_quantized=False)
          for row in nested("transformer_block.", BLOCK)),
        *kept("glue", DRAFT, "input_proj"),
        *kept("norm", NORM, "hidden_norm", "embed_norm"),
    ),
    mtp_count_keys=("mtp_config.num_nextn_predict_layers",),
    loader=Loader(unknown_name="ValueError", refuses_missing_mtp=True, builds_as_drafted=True),
    no_draft="the block can only stay BF16",
    no_backbone="transformers has its matrices with the rows in another order, which is not undone after " "calibration",
    notes="on disk model.mtp.layers.{i}; the block stays BF16, vLLM loads no quantized one; it " "builds k layers of it",
)  # fmt: skip
