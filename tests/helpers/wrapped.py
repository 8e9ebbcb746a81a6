"""Checkpoints whose tables are those of a family, under other names: text alone, or inside a
vision-language model.

In: nothing. Out: WRAPPED, model_type or architecture -> a function that makes config.json and
tensors, tiny. The inner names and shapes are those of the family's layout. The outer ones: vLLM
0.32.0's config classes and weight mappers (Qwen4ExpForCausalLM, InklingForCausalLM), its own test
of BailingMoeV3VLConfig, NVIDIA-NeMo/Megatron-Bridge's test of Nemotron Omni's shards
(`language_model.backbone.embeddings.weight`, `language_model.mtp.layers.0.*`). A tower is left out
where no published listing of it was found. What stands in config.json around the inner one:
wrapped.yaml.
"""

from layouts import COMMON, TABLES
from releases import source_layout
from tables import table
from tensors import Config, Tensors, build

_OUTER = table("helpers/wrapped")


def qwen4_exp_text() -> tuple[Config, Tensors]:
    config, tensors = source_layout("qwen3.8-flash-next")
    inner = {
        name.replace("model.language_model.", "model."): spec
        for name, spec in tensors.items()
        if not name.startswith("model.visual.")
    }
    return config["text_config"] | _OUTER["qwen4_exp_text"], inner


def inkling_model() -> tuple[Config, Tensors]:
    config, tensors = source_layout("inkling")
    text = config.pop("text_config")
    del config["model_type"]
    return text | config | _OUTER["inkling_model"], tensors


def bailing_v3_vl() -> tuple[Config, Tensors]:
    text, tensors = source_layout("ling-3.0-flash")
    config = _OUTER["bailing_moe_v3_vl"] | {"text_config": text}
    tower = {
        f"model.visual.{name}": spec
        for name, spec in build("qwen_vision_tower", config["vision_config"], COMMON).items()
        if "merger.linear_" not in name
    }
    return config, tensors | tower | build("linear_proj", text, TABLES["bailing_hybrid"])


def intern_s2_preview() -> tuple[Config, Tensors]:
    config, tensors = source_layout("qwen3.5-397b")
    tensors["model.time_series.norm.weight"] = ("BF16", (8,))
    return config | _OUTER["intern_s2_preview"], tensors


def nemotron_omni(
    model_type: str = "nemotron_h_omni_by_its_own_class",
) -> tuple[Config, Tensors]:
    """The language model; with the release's model_type vLLM takes transformers' class, which it
    cannot read.

    Under another one its keys are read as they are, as the release's own class has them.
    """
    text, tensors = source_layout("nemotron-3-super")
    config = _OUTER["NemotronH_Omni_Reasoning_V3"] | {
        "model_type": model_type,
        "llm_config": text,
    }
    return config, {f"language_model.{name}": spec for name, spec in tensors.items()}


WRAPPED = {
    "qwen4_exp_text": qwen4_exp_text,
    "inkling_model": inkling_model,
    "bailing_moe_v3_vl": bailing_v3_vl,
    "intern_s2_preview": intern_s2_preview,
    "NemotronH_Omni_Reasoning_V3": nemotron_omni,
}
