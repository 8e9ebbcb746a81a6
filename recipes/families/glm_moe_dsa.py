"""GLM-5: DeepSeek-V3.2's architecture under GLM's name.

vLLM 0.32.0 serves it with the classes of deepseek_v32 (models/deepseek_v32/{nvidia,amd}/mtp.py).
"""

from dataclasses import replace

from ..family import Draft
from . import deepseek_v32

FAMILY = replace(
    deepseek_v32.FAMILY,
    model_type="glm_moe_dsa",
    draft=Draft(
        model_type="glm_moe_dsa",
        classes="GlmMoeDsa",
        zeroes_first=True,
        chains_normed=True,
        can_keep_choice=True,
        proof="vllm, attention by a reference",
        layers=(
            {
                "layer_types": ["deepseek_sparse_attention"],
                "mlp_layer_types": ["sparse"],
                "indexer_types": ["full"],
            },
        ),
    ),
    notes="MTP is model.layers.{num_hidden_layers}; vLLM refuses a checkpoint whose MTP block was "
    "dropped",
)
