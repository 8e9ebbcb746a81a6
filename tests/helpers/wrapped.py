"""Checkpoints whose tables are those of a family, under other names: text alone, or inside a
vision-language model.

In: nothing. Out: WRAPPED, model_type or architecture -> a function that makes config.json and
tensors, tiny. The inner names and shapes are those of the family's layout. The outer ones: vLLM
0.32.0's config classes and weight mappers (Qwen4ExpForCausalLM, InklingForCausalLM), its own test
of BailingMoeV3VLConfig, NVIDIA-NeMo/Megatron-Bridge's test of Nemotron Omni's shards
(`language_model.backbone.embeddings.weight`, `language_model.mtp.layers.0.*`). A tower is left out
where no published listing of it was found.
"""

from collections.abc import Callable

import releases
from tensors import Config, Tensors, linear, table, vectors

OUTER = ("architectures", "model_type", "text_config", "vision_config")


def _tiny(model: str) -> tuple[Config, Tensors]:
    return releases.source_layout(model, size="tiny")


def _renamed(tensors: Tensors, *pairs: tuple[str, str]) -> Tensors:
    for old, new in pairs:
        tensors = {
            new + name.removeprefix(old) if name.startswith(old) else name: s
            for name, s in tensors.items()
        }
    return tensors


def qwen4_exp_text() -> tuple[Config, Tensors]:
    config, tensors = _tiny("qwen3.8-flash-next")
    text = config["text_config"] | {
        "architectures": ["Qwen4ExpForCausalLM"],
        "torch_dtype": "bfloat16",
    }
    inner = {name: spec for name, spec in tensors.items() if not name.startswith("model.visual.")}
    return text, _renamed(inner, ("model.language_model.", "model."))


def inkling_model() -> tuple[Config, Tensors]:
    config, tensors = _tiny("inkling")
    outer = {key: value for key, value in config.items() if key not in OUTER}
    return config["text_config"] | outer | {"architectures": ["InklingForCausalLM"]}, tensors


def bailing_v3_vl() -> tuple[Config, Tensors]:
    text, tensors = _tiny("ling-3.0-flash")
    vision = {
        "model_type": "qwen3_moe_vit",
        "depth": 1,
        "hidden_size": 128,
        "hidden_act": "gelu_pytorch_tanh",
        "intermediate_size": 256,
        "num_heads": 2,
        "in_channels": 3,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 512,
        "num_position_embeddings": 16,
        "disable_merger_proj": True,
    }
    config = {
        "architectures": ["BailingMoeV3VLForConditionalGeneration"],
        "model_type": "bailing_moe_v3_vl",
        "image_token_id": 300,
        "video_token_id": 301,
        "vision_start_token_id": 302,
        "vision_end_token_id": 303,
        "norm_query_embeds": False,
        "mrope_section": [8, 12, 12],
        "text_config": text,
        "vision_config": vision,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    hidden = text["hidden_size"]
    tower = {
        n: s for n, s in table("qwen.vision_tower", vision).items() if ".merger.linear_" not in n
    }
    tower |= linear("model.linear_proj.0", hidden, 512, bias=True) | linear(
        "model.linear_proj.2", hidden, hidden, bias=True
    )
    return config, tensors | tower


def intern_s2_preview() -> tuple[Config, Tensors]:
    config, tensors = _tiny("qwen3.5-397b")
    config |= {
        "architectures": ["InternS2PreviewForConditionalGeneration"],
        "model_type": "intern_s2_preview",
        "auto_map": {"AutoConfig": "configuration_interns2_preview.InternS2PreviewConfig"},
    }
    return config, tensors | vectors(["model.time_series.norm.weight"], 8)


def nemotron_omni(model_type: str = "nemotron_h_omni_by_its_own_class") -> tuple[Config, Tensors]:
    """The language model; with the release's model_type vLLM takes transformers' class, which it
    cannot read.

    Under another one its keys are read as they are, as the release's own class has them.
    """
    text, tensors = _tiny("nemotron-3-super")
    config = {
        "architectures": ["NemotronH_Omni_Reasoning_V3"],
        "model_type": model_type,
        "llm_config": text,
        "auto_map": {
            "AutoConfig": "configuration_nemotron_h_omni.NemotronH_Omni_Reasoning_V3_Config"
        },
        "vision_config": {
            "model_type": "radio",
            "args": {"model": "vit_huge_patch16_224"},
            "patch_size": 16,
            "video_temporal_patch_size": 2,
        },
        "video_temporal_patch_size": 2,
        "sound_config": None,
        "torch_dtype": "bfloat16",
        "force_image_size": 512,
        "downsample_ratio": 0.5,
        "patch_size": 16,
        "template": None,
        "ps_version": "v2",
        "image_tag_type": "internvl",
        "vit_hidden_size": 1280,
        "projector_hidden_size": 256,
        "norm_mean": [0.5] * 3,
        "norm_std": [0.5] * 3,
    }
    return config, {f"language_model.{name}": spec for name, spec in tensors.items()}


WRAPPED: dict[str, Callable[[], tuple[Config, Tensors]]] = {
    "qwen4_exp_text": qwen4_exp_text,
    "inkling_model": inkling_model,
    "bailing_moe_v3_vl": bailing_v3_vl,
    "intern_s2_preview": intern_s2_preview,
    "NemotronH_Omni_Reasoning_V3": nemotron_omni,
}
