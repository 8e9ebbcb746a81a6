"""GLM-4.7-Flash: latent attention, routed experts, one inlined MTP layer.

vLLM 0.32.0: model_executor/models/glm4_moe_lite.py, glm4_moe_lite_mtp.py. No completeness check: a
missing MTP block is served with uninitialised weights.
"""

from ..family import Draft, Family, Loader
from ._blocks import DEEPSEEK_MLP, DEEPSEEK_MTP, INLINED, MLA, NORMS

FAMILY = Family(
    model_type="glm4_moe_lite",
    layouts=INLINED,
    block=(*MLA, *DEEPSEEK_MLP, *NORMS),
    mtp_block=DEEPSEEK_MTP,
    loader=Loader(takes_kv_scales=True),
    draft=Draft(
        model_type="glm4_moe_lite",
        classes="Glm4MoeLite",
        layers=({"mlp_layer_types": ["sparse"]},),
        zeroes_first=True,
        chains_normed=False,
        proof="vllm",
    ),
    notes="MTP is model.layers.{num_hidden_layers}; vLLM does not notice a missing block",
)
