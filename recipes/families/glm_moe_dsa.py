"""GLM-5: DeepSeek-V3.2's architecture under GLM's name.

vLLM 0.32.0 serves it with the classes of deepseek_v32 (models/deepseek_v32/{nvidia,amd}/mtp.py).
"""

from ..family import Family, Layout, Loader, Stem
from ._blocks import DEEPSEEK_MLP, DEEPSEEK_MTP, INDEXER, MLA, NORMS, TOP

FAMILY = Family(
    model_type="glm_moe_dsa",
    layouts={
        "*": Layout(layers=Stem(disk="model.layers.{i}.", runtime="model.layers.{i}."), mtp=None, top=TOP),
    },
    block=(*MLA, *INDEXER, *DEEPSEEK_MLP, *NORMS),
    mtp_block=DEEPSEEK_MTP,
    loader=Loader(refuses_missing_mtp=True, takes_kv_scales=True),
    notes="MTP is model.layers.{num_hidden_layers}; vLLM refuses a checkpoint whose MTP block was dropped",
)
