"""DeepSeek-V3.2: DeepSeek-V3 with a sparse-attention indexer, in the MTP layer too.

vLLM 0.32.0: models/deepseek_v32/{nvidia,amd}/mtp.py. `indexer.wk` and `weights_proj` are fused into
wk_weights_proj, which is built without a quantization config (an FP8 block `wk` is dequantized on
load, a packed one is a KeyError).
"""

from ..family import Draft, Family, Loader
from ._blocks import DEEPSEEK_MLP, DEEPSEEK_MTP, INDEXER, INLINED, MLA, NORMS

FAMILY = Family(
    model_type="deepseek_v32",
    layouts=INLINED,
    block=(*MLA, *INDEXER, *DEEPSEEK_MLP, *NORMS),
    mtp_block=DEEPSEEK_MTP,
    loader=Loader(refuses_missing_mtp=True),
    draft=Draft(
        model_type="deepseek_v32",
        classes="DeepseekV32",
        zeroes_first=True,
        chains_normed=True,
        can_keep_choice=True,
        proof="vllm, attention by a reference",
        layers=({"layer_types": ["deepseek_sparse_attention"], "mlp_layer_types": ["sparse"]},),
    ),
    notes="MTP is model.layers.{num_hidden_layers}; the indexer stays BF16",
)
