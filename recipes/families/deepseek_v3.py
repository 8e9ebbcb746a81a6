"""DeepSeek-V3, V3.1 and R1 (and Kimi-K2 configs of the same model_type): latent attention, one
inlined MTP layer.

vLLM 0.32.0: model_executor/models/deepseek_v2.py, deepseek_mtp.py. The draft's head is constructed
as `model.layers.{N}.head`; an entry `...shared_head.head` does not reach it. Released weights are
FP8 in 128x128 blocks (`weight_scale_inv`), MTP block included.
"""

from ..family import Draft, Family, Loader
from ._blocks import DEEPSEEK_MLP, DEEPSEEK_MTP, INLINED, MLA, NORMS

FAMILY = Family(
    model_type="deepseek_v3",
    layouts=INLINED,
    block=(*MLA, *DEEPSEEK_MLP, *NORMS),
    mtp_block=DEEPSEEK_MTP,
    loader=Loader(refuses_missing_mtp=True, takes_kv_scales=True),
    draft=Draft(
        model_type="deepseek_v3",
        classes="DeepseekV3",
        layers=({"first_k_dense_replace": 0},),
        zeroes_first=True,
        chains_normed=True,
        proof="vllm",
    ),
    notes="MTP is model.layers.{num_hidden_layers}; released in FP8, dequantized tensor by tensor",
)
