"""Ling 3: delta attention (KDA) with a gated latent-attention layer in each group, one inlined MTP
layer.

vLLM 0.32.0: model_executor/models/bailing_moe_v3.py, bailing_moe_v3_mtp.py. The releases have Ling
2.5's model_type: the architecture identifies them. Under compressed-tensors q, k, v and b of a
delta layer are one module, `qkvb_proj`. Its last shard has one row for each head. The last
projection is `dense` in latent layers and `o_proj` in delta layers. Both loaders skip unknown names
in silence.
"""

from ..family import Family, Layout, Loader, Renames, Row, Stem
from ._blocks import EMBEDDING, HEAD, NORM, NORMS, kept
from .bailing_hybrid import LATENT, LAYERS, LAYOUT_TOP, MLP

DECAY = "decides the delta net's decay"
HEAD_GATE = "one row a head, scales that head's whole output"


def _gate(path: str, reason: str) -> Row:
    return Row(path=f"attention.{path}", role="state", runtime=f"self_attn.{path}", why_kept=reason)


VISION_LANGUAGE = Layout(
    layers=Stem(disk="model.layers.{i}.", runtime="language_model.model.layers.{i}."),
    mtp=None,
    mtp_runtime="model.layers.{i}.",
    top=(
        Row(path="model.word_embeddings", role="embedding", runtime="language_model.model.word_embeddings",
            why_kept=EMBEDDING, loads_quantized=False),
        Row(path="lm_head", role="head", runtime="language_model.lm_head", why_kept=HEAD),
        *kept("norm", NORM, "model.norm"),
    ),
    opaque=(("model.visual.", "visual.", "vision"), ("model.linear_proj.", "linear_proj.", "vision")),
    renames=Renames(
        substrings=((".attention.", ".self_attn."),),
        prefixes=(
            ("model.visual", "visual"), ("model.linear_proj", "linear_proj"),
            ("linear_proj.0", "linear_proj.linear_fc1"), ("linear_proj.2", "linear_proj.linear_fc2"),
            ("lm_head", "language_model.lm_head"), ("model.", "language_model.model."),
        ),
    ),
)  # fmt: skip
FAMILY = Family(
    model_type="bailing_hybrid",
    architectures=("BailingMoeV3ForCausalLM", "BailingMoeV3VLForConditionalGeneration"),
    layouts={
        "BailingMoeV3VLForConditionalGeneration": VISION_LANGUAGE,
        "*": Layout(
            layers=LAYERS, mtp=None, top=LAYOUT_TOP, renames=Renames(substrings=((".attention.", ".self_attn."),))
        )
    },
    block=(
        *LATENT,
        _gate("g_proj", HEAD_GATE),
        Row(path="attention.dense", role="attention", runtime="self_attn.dense"),
        *MLP,
        *NORMS,
    ),
    linear_block=(
        *(Row(path=f"attention.{name}_proj", role="linear_attention", runtime="self_attn.qkvb_proj",
              shares="self_attn.qkvb_proj") for name in "qkvb"),
        *(Row(path=f"attention.{name}", role="linear_attention", runtime=f"self_attn.{name}")
          for name in ("g_proj", "o_proj")),
        _gate("f_proj", DECAY),
        *kept("state", "small, sets the recurrence", "attention.A_log", "attention.dt_bias",
              *(f"attention.{name}_conv1d" for name in "qkv")),
        *kept("norm", NORM, "attention.o_norm"),
    ),
    mtp_block=(
        *kept("glue", "joins embedding and hidden state for the whole draft", "eh_proj", loads_quantized=True),
        *kept("norm", NORM, "enorm", "hnorm", "final_layernorm"),
        Row(path="shared_head.head", role="head", why_kept=HEAD),
    ),
    loader=Loader(
        unknown_name="", refuses_missing_mtp=True, takes_kv_scales=True, missing_count="AttributeError"
    ),
    no_draft="transformers has no class for Ling 3's layers",
    notes="MTP is model.layers.{num_hidden_layers}; attention.* on disk is self_attn.* in vLLM",
)  # fmt: skip
