"""MiMo-V2.5 and its like: MiMo-V2-Flash's layers with q, k and v in one tensor, mostly with vision
and audio towers.

vLLM 0.32.0: model_executor/models/mimo_v2.py, mimo_v2_mtp.py, mimo_v2_omni.py. With a vision_config
vLLM builds the model as MiMoV2OmniForCausalLM, whatever config.json says: the backbone gets the
prefix `language_model.`, the draft does not.

Easy to get wrong: the rows of `qkv_proj` are cut into `num_key_value_heads` slices, each with rows
of q, k and v. vLLM puts them in order only in the release's own FP8 (`weight_scale_inv`). In any
other form the target takes them for [q; k; v], the draft cuts them by rank (vllm #42803), and FP8
with `weight_scale` is never loaded at all. keepmtp therefore writes q, k and v in three tensors,
which vLLM loads at any number of ranks.
"""

from dataclasses import replace

from ..family import Interleaved, Layout, Renames, Row, Stem
from ._blocks import EMBEDDING, HEAD, NORM, kept
from .mimo_v2_flash import FAMILY as FLASH

ROWS = "its rows are in the order of the release's ranks, so q, k and v are written apart"
QKV_PATHS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
QKV = Row(
    path="self_attn.qkv_proj", role="attention", why_kept=ROWS, aliases=QKV_PATHS, in_every_layer=False,
    interleaved=Interleaved(into=QKV_PATHS, count="num_key_value_heads", sliding="hybrid_layer_pattern"),
)  # fmt: skip
OMNI = Layout(
    layers=Stem(disk="model.layers.{i}.", runtime="language_model.model.layers.{i}."),
    mtp=Stem(disk="model.mtp.layers.{i}.", runtime="model.mtp.layers.{i}."),
    top=(
        Row(path="model.embed_tokens", role="embedding", runtime="language_model.model.embed_tokens",
            why_kept=EMBEDDING, loads_quantized=False),
        Row(path="lm_head", role="head", runtime="language_model.lm_head", why_kept=HEAD),
        *kept("norm", NORM, "model.norm"),
    ),
    opaque=(
        ("visual.", "visual.", "vision"),
        ("audio_encoder.", "audio_encoder.", "vision"),
        ("speech_embeddings.", "audio_encoder.speech_embeddings.", "vision"),
    ),
    renames=Renames(prefixes=(
        ("speech_embeddings.", "audio_encoder.speech_embeddings."),
        ("model.language_model.", "language_model.model."), ("model.visual.", "visual."),
        ("lm_head.", "language_model.lm_head."), ("model.", "language_model.model."),
    )),
)  # fmt: skip

FAMILY = replace(
    FLASH,
    model_type="mimo_v2",
    layouts={**FLASH.layouts, "MiMoV2OmniForCausalLM": OMNI},
    with_vision="MiMoV2OmniForCausalLM",
    block=(*FLASH.block, QKV),
    config_changes={"attention_projection_layout": "split"},
    draft=None,
    no_draft="transformers has no class for mimo_v2",
    notes="one qkv_proj in the release, q, k and v in what keepmtp writes; vLLM drafts with the "
    "first of three layers",
)
