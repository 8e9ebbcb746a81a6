"""dots3-note: sparse and sliding-window latent attention, routed experts, one inlined dense MTP
layer, own embedding.

vLLM 0.32.0: models/dots3_note/nvidia/{model,mtp,multimodal}.py. The draft is constructed as
`model.layers.{N}`, the target as `language_model.model.layers.{i}`. The target's mapper puts
`language_model.` before every plain entry that starts with `model.`, so only regexes reach the
draft. The draft keeps an embedding of its own and takes the target's head, although it builds one
as `model.layers.{N}.head`.
"""

from dataclasses import replace

from ..family import Family, Layout, Loader, Renames, Row, Stem
from ._blocks import DEEPSEEK_MLP, EMBEDDING, HEAD, INDEXER, MLA, NORM, NORMS, kept

GLUE = (
    "joins embedding and hidden state for the whole draft: small, and everything passes through it"
)
HEAD_GATE = "one row a head, scales that head's whole output"


def _inside(row: Row) -> Row:
    return replace(row, runtime=f"language_model.{row.path}")


FAMILY = Family(
    model_type="dots3_note",
    layouts={
        "*": Layout(
            layers=Stem(disk="model.layers.{i}.", runtime="language_model.model.layers.{i}."),
            mtp=None,
            mtp_runtime="model.layers.{i}.",
            top=tuple(map(_inside, (
                *kept("embedding", EMBEDDING, "model.embed_tokens"),
                *kept("head", HEAD, "lm_head", loads_quantized=True),
                *kept("norm", NORM, "model.norm"),
            ))),
            mtp_top=(
                Row(path="model.mtp.embed_tokens", role="embedding", runtime="model.embed_tokens",
                    why_kept="rows are looked up, not multiplied", loads_quantized=False, is_drafts_own=True),
            ),
            opaque=(("vision_encoder.", "visual.", "vision"), ("audio_encoder.", "audio_tower.", "vision")),
            renames=Renames(prefixes=(
                ("model.", "language_model.model."), ("lm_head.", "language_model.lm_head."),
                ("mtp.", "language_model.mtp."), ("vision_encoder.", "visual."), ("audio_encoder.", "audio_tower."),
            )),
        ),
    },
    block=(
        *MLA,
        *kept("norm", NORM, "self_attn.k_rope_only_layernorm"),
        *kept("state", HEAD_GATE, "self_attn.g_proj", loads_quantized=True),
        *INDEXER,
        *DEEPSEEK_MLP,
        *NORMS,
    ),
    mtp_block=(
        *kept("glue", GLUE, "eh_proj", loads_quantized=True),
        *kept("norm", NORM, "enorm", "hnorm", "shared_head.norm"),
        Row(path="shared_head.head", role="head", runtime="head", why_kept=HEAD),
    ),
    mtp_count_default=1,
    loader=Loader(refuses_missing_mtp=True),
    no_draft="transformers has no class for dots3-note's layers",
    notes="MTP is model.layers.{N} and model.mtp.embed_tokens; names in vLLM have no " "language_model. there",
)  # fmt: skip
