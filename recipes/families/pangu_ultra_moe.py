"""openPangu-Ultra-MoE: DeepSeek-V3's layout with sandwich norms, one inlined MTP layer.

vLLM 0.32.0: model_executor/models/openpangu.py, openpangu_mtp.py. Unlike DeepSeek's, the draft's
head is constructed as `model.layers.{N}.shared_head.head`. The draft loads, but its forward raises
in 0.32.0: it is DeepSeek's, and reads `use_sequence_parallel_moe` of a decoder layer that has none.
"""

from dataclasses import replace

from ..family import Family, Loader
from ._blocks import DEEPSEEK_MLP, DEEPSEEK_MTP, INLINED, MLA, NORM, NORMS, kept

FAMILY = Family(
    model_type="pangu_ultra_moe",
    layouts=INLINED,
    block=(
        *MLA,
        *DEEPSEEK_MLP,
        *NORMS,
        *kept("norm", NORM, "pre_mlp_layernorm", "post_mlp_layernorm"),
    ),
    mtp_block=tuple(replace(row, runtime="") for row in DEEPSEEK_MTP),
    loader=Loader(backbone_takes_kv_scales=False, missing_count="AttributeError"),
    no_draft="transformers has no class for openPangu's layers, and vLLM 0.32.0 cannot run the draft",
    notes="MTP is model.layers.{num_hidden_layers}; vLLM 0.32.0 raises AttributeError when the "
    "draft runs",
)
