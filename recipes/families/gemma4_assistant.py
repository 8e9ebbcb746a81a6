"""Gemma 4's assistants: the draft is a checkpoint of its own, with four layers for one draft token.

vLLM 0.32.0: model_executor/models/gemma4_mtp.py. There is no backbone here: the target is another
checkpoint, which says nothing about MTP. The speculative config's `model` names this one. The draft
reads its own quantization config and attends to the target's keys and values: its layers have only
queries. vLLM constructs its modules as `draft_model.*`, without a packed mapping: a list must name
`gate_up_proj` itself.
"""

from ..family import Family, Layout, Loader, Row, Stem
from ._blocks import EMBEDDING, HEAD, NORM, gated_mlp, kept, plain

PROJECTION = "joins draft and target: small, and everything passes through it"
CENTROIDS = "vLLM builds them as a plain nn.Linear, which has no slot for scales"

FAMILY = Family(
    model_type="gemma4_assistant",
    also=("gemma4_unified_assistant",),
    layouts={
        "*": Layout(
            layers=Stem(disk="model.layers.{i}.", runtime="draft_model.layers.{i}."),
            mtp=None,
            top=(),
            mtp_top=(
                *(
                    Row(path=name, role="glue", runtime=f"draft_model.{name}", why_kept=PROJECTION)
                    for name in ("pre_projection", "post_projection")
                ),
                *kept("norm", NORM, "model.norm"),
                Row(path="model.embed_tokens", role="embedding", runtime="draft_model.embed_tokens",
                    why_kept=EMBEDDING, loads_quantized=False, is_drafts_own=True),
                Row(path="lm_head", role="head", why_kept=HEAD, is_drafts_own=True),
                Row(path="masked_embedding.centroids", role="head", why_kept=CENTROIDS, loads_quantized=False,
                    is_drafts_own=True),
                *kept("state", "the vocabulary in the order of its clusters", "masked_embedding.token_ordering"),
            ),
        ),
    },
    block=(),
    mtp_block=(
        *plain("attention", "self_attn.q_proj", "self_attn.o_proj"),
        *gated_mlp("mlp", "dense_mlp"),
        *kept("norm", NORM, "self_attn.q_norm", "input_layernorm", "post_attention_layernorm",
              "pre_feedforward_layernorm", "post_feedforward_layernorm"),
        *kept("state", "one value a layer", "layer_scalar"),
    ),
    mtp_count_keys=("num_hidden_layers",),
    num_layers_key="",
    layer_types_count_mtp=True,
    loader=Loader(unknown_name="ValueError"),
    no_draft="the draft is a checkpoint of its own that attends to its target's keys and values",
    notes="a checkpoint that is the draft; in vLLM draft_model.*, named by the speculative " "config's model",
)  # fmt: skip
