"""Which models vLLM 0.32.0 has an MTP draft for, whether keepmtp has a table for them or not.

In: a config.json. Out: yes or no.

Easy to get wrong: vLLM compares some models by model_type and some by their first architecture.
Source: vLLM 0.32.0 config/speculative.py, SpeculativeConfig.hf_config_override;
tests/recipes/test_families.py compares the names with it.
"""

from collections.abc import Mapping
from typing import Any

MODEL_TYPES = frozenset(
    {
        "bailing_hybrid",
        "deepseek_v3",
        "deepseek_v32",
        "deepseek_v4",
        "dots3_note",
        "ernie4_5_moe",
        "exaone4_5",
        "exaone_moe",
        "gemma4_assistant",
        "gemma4_unified_assistant",
        "glm5_next",
        "glm_moe_dsa",
        "hy_v3",
        "hy_v4",
        "inkling_mm_model",
        "inkling_model",
        "intern_s2_preview",
        "interns2_mobius",
        "kimi_k3",
        "longcat_flash",
        "minimax_m3_mtp",
        "minimax_m3_vl",
        "nemotron_h",
        "nemotron_h_puzzle",
        "pangu_ultra_moe",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_next",
        "qwen4_exp",
        "qwen4_exp_text",
        "step3p5",
        "step3p7",
    }
)
ARCHITECTURES = frozenset(
    {
        "BailingMoeV2_5ForCausalLM",
        "BailingMoeV3ForCausalLM",
        "BailingMoeV3VLForConditionalGeneration",
        "Glm4MoeForCausalLM",
        "Glm4MoeLiteForCausalLM",
        "GlmOcrForConditionalGeneration",
        "MiMoForCausalLM",
        "MiMoV2FlashForCausalLM",
        "MiMoV2ForCausalLM",
        "MiMoV2OmniForCausalLM",
        "MiniMaxM3MTP",
        "MiniMaxM3SparseForConditionalGeneration",
        "NemotronH_Omni_Reasoning_V3",
        "NemotronH_Super_Omni_Reasoning_V3",
        "Step3p5ForCausalLM",
        "Step3p7ForConditionalGeneration",
    }
)


def is_drafted(config: Mapping[str, Any]) -> bool:
    """Whether method=mtp has a draft class for the model of this config.json."""
    architectures = config.get("architectures")
    first = architectures[0] if isinstance(architectures, list) and architectures else ""
    return config.get("model_type") in MODEL_TYPES or first in ARCHITECTURES
