"""GLM-4.5, 4.6, 4.7 and their Air versions: grouped-query attention, routed experts, one inlined
MTP layer.

vLLM 0.32.0: model_executor/models/glm4_moe.py, glm4_moe_mtp.py. Its loader drops an unknown
`.weight_scale` in silence (glm4_moe_mtp.py) and would load a quantized eh_proj as raw bytes: the
row below forbids it.
"""

from ..family import Draft, Family, Loader
from ._blocks import DEEPSEEK_MLP, DEEPSEEK_MTP, GQA, INLINED, NORMS

FAMILY = Family(
    model_type="glm4_moe",
    layouts=INLINED,
    block=(*GQA, *DEEPSEEK_MLP, *NORMS),
    mtp_block=DEEPSEEK_MTP,
    loader=Loader(drops_scales=True, draft_kv_names="own"),
    draft=Draft(
        model_type="glm4_moe",
        classes="Glm4Moe",
        layers=({"first_k_dense_replace": 0},),
        zeroes_first=True,
        chains_normed=False,
        proof="vllm",
    ),
    notes="MTP is model.layers.{num_hidden_layers}; a missing block loads in silence when quantized",
)
