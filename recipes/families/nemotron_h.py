"""Nemotron-H (Nemotron 3 Super and Ultra): Mamba-2, attention and latent experts in layers of one
mixer each.

vLLM 0.32.0: model_executor/models/nemotron_h.py, nemotron_h_mtp.py. An MTP layer is a list of such
layers (`mtp_hybrid_override_pattern`, "*E": attention, then experts), with glue before the first
and a norm after the last. The draft reads config.json again: entries for it have its own names
(`mtp.layers.*`), which are those on disk. Its loader skips unknown names in silence.

Nemotron Omni has the language model under `language_model.`, its MTP block too. vLLM makes the
draft's config of config.json's part for the language model, without the quantization config: the
draft of a quantized checkpoint is built only if that part has it as well. Its config class is that
of the release: that of transformers lacks keys.
"""

from ..family import Draft, Family, Layout, Loader, Renames, Row, Stem
from ._blocks import EMBEDDING, HEAD, NORM, ROUTER, fused, kept, plain

JOINS = "joins embedding and hidden state for the whole draft"
LATENT = "every routed expert reads and writes through it"
RECURRENCE = "small, sets the recurrence"
# compressed_tensors_moe.py asks for all three projections of expert 0, also for the one that is
# missing.
NO_GATE = "mixer.experts.{e}.None"


def _mtp_top(outer: str) -> tuple[Row, ...]:
    first, last = f"{outer}mtp.layers.0.", f"{outer}mtp.layers.1."
    return (
        Row(path=f"{first}eh_proj", role="glue", runtime="mtp.layers.0.eh_proj", why_kept=JOINS),
        *kept("norm", NORM, f"{first}enorm", f"{first}hnorm", f"{last}final_layernorm"),
    )


DRAFT_RENAMES = Renames(
    substrings=(("embeddings", "embed_tokens"),), prefixes=(("language_model.", ""),)
)
TEXT = Layout(
    layers=Stem(disk="backbone.layers.{i}.", runtime="model.layers.{i}."),
    mtp=Stem(disk="mtp.layers.{i}.", runtime="mtp.layers.{i}."),
    top=(
        Row(path="backbone.embeddings", role="embedding", runtime="model.embed_tokens", why_kept=EMBEDDING,
            loads_quantized=False),
        *kept("head", HEAD, "lm_head", loads_quantized=True),
        *kept("norm", NORM, "backbone.norm_f"),
    ),
    mtp_top=_mtp_top(""),
    draft_head="lm_head",
    renames=Renames(substrings=(("A_log", "A"), ("embeddings", "embed_tokens")), prefixes=(("backbone", "model"),)),
    draft_reads_afresh=True,
    draft_renames=DRAFT_RENAMES,
)  # fmt: skip
OMNI = Layout(
    layers=Stem(disk="language_model.backbone.layers.{i}.", runtime="language_model.model.layers.{i}."),
    mtp=Stem(disk="language_model.mtp.layers.{i}.", runtime="mtp.layers.{i}."),
    top=(
        Row(path="language_model.backbone.embeddings", role="embedding", runtime="language_model.model.embed_tokens",
            why_kept=EMBEDDING, loads_quantized=False),
        *kept("head", HEAD, "language_model.lm_head", loads_quantized=True),
        *kept("norm", NORM, "language_model.backbone.norm_f"),
    ),
    mtp_top=_mtp_top("language_model."),
    opaque=tuple((prefix, prefix, "vision")
                 for prefix in ("vision_model.", "mlp1.", "sound_encoder.", "sound_projection.", "vision_projector.")),
    head="language_model.lm_head.weight",
    draft_head="lm_head",
    renames=Renames(prefixes=(("language_model.backbone", "language_model.model"),)),
    draft_reads_afresh=True,
    draft_renames=DRAFT_RENAMES,
    draft_reads_text_config=True,
)  # fmt: skip
OMNI_ARCHITECTURES = ("NemotronH_Omni_Reasoning_V3", "NemotronH_Super_Omni_Reasoning_V3")

FAMILY = Family(
    model_type="nemotron_h",
    also=OMNI_ARCHITECTURES,
    layouts={**dict.fromkeys(OMNI_ARCHITECTURES, OMNI), "*": TEXT},
    block=(
        *fused("mixer.qkv_proj", "mixer.q_proj", "mixer.k_proj", "mixer.v_proj", role="attention"),
        *plain("attention", "mixer.o_proj"),
        *plain("linear_attention", "mixer.in_proj", "mixer.out_proj"),
        *kept("state", RECURRENCE, "mixer.conv1d", "mixer.A_log", "mixer.D", "mixer.dt_bias"),
        *kept("norm", NORM, "mixer.norm", "norm"),
        *plain("dense_mlp", "mixer.up_proj", "mixer.down_proj"),
        Row(path="mixer.experts.{e}.up_proj", role="experts", runtime="mixer.experts", aliases=(NO_GATE,)),
        Row(path="mixer.experts.{e}.down_proj", role="experts", runtime="mixer.experts"),
        *plain("shared_experts", "mixer.shared_experts.up_proj", "mixer.shared_experts.down_proj"),
        *kept("glue", LATENT, "mixer.fc1_latent_proj", "mixer.fc2_latent_proj", loads_quantized=True),
        *kept("router", ROUTER, "mixer.gate"),
    ),
    layer_list_keys=("layers_block_type", "hybrid_override_pattern"),
    mtp_parts_keys=("mtp_hybrid_override_pattern", "mtp_layers_block_type"),
    one_mixer=True,
    loader=Loader(unknown_name="", takes_kv_scales=True, missing_count="NotImplementedError"),
    draft=Draft(
        model_type="nemotron_h", classes="NemotronH", decoder="NemotronHBlock", rotary=None,
        layers=({"layers_block_type": ["full_attention"]}, {"layers_block_type": ["moe"]}),
        embedding_norm="mtp.layers.0.enorm", hidden_norm="mtp.layers.0.hnorm", projections=("mtp.layers.0.eh_proj",),
        final_norm="mtp.layers.1.final_layernorm", zeroes_first=False, chains_normed=True, proof="source",
    ),
    notes="MTP is mtp.layers.*, one for each block of mtp_hybrid_override_pattern; vLLM skips " "unknown names in silence",
)  # fmt: skip
