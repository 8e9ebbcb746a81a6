"""The names under which SGLang asks about modules, against those that its own classes were seen to
construct.
"""

import pytest
import releases
from keepmtp.recipes.families import find_view
from keepmtp.recipes.family import HFName
from keepmtp.recipes.runtimes.sglang import sglang_model, sglang_models, sglang_names

# Model -> modules that SGLang's draft class constructs with a quantization config.
SEEN = {
    "ring-2.5-1t": (
        "model.layers.4.attention.fused_qkv_a_proj_with_mqa",
        "model.layers.4.attention.o_proj",
        "model.layers.4.eh_proj",
        "model.layers.4.mlp.experts.0.gate_proj",
    ),
    "ling-3.0-flash": (
        "model.layers.4.attention.kv_a_proj_with_mqa",
        "model.layers.4.experts.0.gate_proj",
        "model.layers.4.shared_experts.gate_up_proj",
    ),
    "dots3-note-prev": (
        "model.heads.0.decoder.self_attn.fused_qkv_a_g_proj_with_mqa",
        "model.heads.0.eh_proj",
    ),
    "ernie-4.5-21b": ("model.mtp_block.self_attn.qkv_proj", "model.mtp_block.mlp.gate_up_proj"),
    "k-exaone-236b": ("model.layers.0.self_attn.qkv_proj", "lm_head"),
    "gemma-4-26b-assistant": ("pre_projection", "model.layers.0.self_attn.qkv_proj"),
    "glm-5.3-flash": (
        "model.decoder.self_attn.fused_qkv_a_proj_with_mqa",
        "model.decoder.mlp.experts.0.up_proj",
    ),
    "glm-ocr": ("model.decoder.self_attn.qkv_proj", "model.decoder.mlp.gate_up_proj"),
    "hy3": ("model.decoder.mlp.shared_mlp.gate_up_proj", "model.decoder.mlp.experts.0.down_proj"),
    "hy4-preview": (
        ".model.decoder.self_attn.linear_gate",
        ".model.decoder.mlp.experts.0.gate_proj",
    ),
    "longcat-flash-chat": ("eh_proj", "self_attn.fused_qkv_a_proj_with_mqa", "mlps.gate_up_proj"),
    "mimo-v2.5": ("model.decoder.self_attn.qkv_proj",),
    "mimo-v2-flash": ("model.decoder.self_attn.o_proj", "model.decoder.mlp.down_proj"),
    "nemotron-3-super": (
        "mtp.layers.0.eh_proj",
        "mtp.layers.1.mixer.experts.0.up_proj",
        "mtp.layers.1.mixer.fc1_latent_proj",
    ),
    "qwen3.8-flash-next": (
        "mtp.layers.0.self_attn.qkv_proj",
        "mtp.layers.0.mlp.experts.0.gate_proj",
    ),
    "dsv4-flash": (
        "model.e_proj",
        "model.decoder.self_attn.wqkv_a",
        "model.decoder.mlp.experts.0.gate_proj",
        "model.decoder.mlp.shared_experts.gate_up_proj",
    ),
    "deepseek-r1": ("model.decoder.self_attn.fused_qkv_a_proj_with_mqa", "model.shared_head.head"),
    "deepseek-v3.2": ("model.decoder.mlp.shared_experts.down_proj",),
    "glm-4.7": ("model.decoder.self_attn.qkv_proj", "model.decoder.mlp.experts.0.gate_proj"),
    "glm-4.7-flash": (
        "model.decoder.self_attn.q_b_proj",
        "model.decoder.self_attn.fused_qkv_a_proj_with_mqa",
    ),
    "glm-5": ("model.decoder.self_attn.kv_b_proj",),
    "qwen3-next-80b": ("model.layers.0.mlp.experts.0.gate_proj",),
    "qwen3.5-27b": ("mtp.layers.0.self_attn.qkv_proj", "mtp.layers.0.mlp.gate_up_proj"),
    "qwen3.5-397b": ("mtp.layers.0.mlp.shared_expert.gate_up_proj",),
    "mimo-7b": ("self_attn.qkv_proj", "mlp.gate_up_proj"),
}


def asked(model: str) -> dict[str, str]:
    """SGLang's name for each module of the draft -> the module on disk."""
    config, tensors = releases.source_layout(model, size="tiny", changes={})
    view = find_view(config, model)
    places = (view.place(HFName(name)) for name in tensors)
    return {
        name: place.module
        for place in places
        if place and place.part == "mtp"
        for name in sglang_names(view, place)
    }


@pytest.mark.parametrize("model", SEEN)
def test_names_of_a_draft_are_those_that_sglang_constructs(model):
    missing = set(SEEN[model]) - set(asked(model))
    # Copies of the head are no tensors of these releases, and the head has one name in both parts.
    assert not missing - {"model.shared_head.head", "lm_head"}


def test_plain_glue_is_never_asked_about():
    for model, glue in (
        ("deepseek-r1", "eh_proj"),
        ("mimo-7b", "input_proj"),
        ("qwen3.5-27b", "fc"),
    ):
        assert not [name for name in asked(model) if name.endswith(glue)]


def test_every_release_has_an_entry_or_no_class():
    for model, config in releases.MODELS.items():
        assert config["architectures"][0] in sglang_models(), model


def test_a_model_without_a_draft_says_why():
    assert sglang_model({"architectures": ["NoneForCausalLM"]}).no_draft
    for architecture, model in sglang_models().items():
        assert (model.draft is None) == bool(model.no_draft), architecture
