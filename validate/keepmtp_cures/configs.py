"""Keys of config.json that vLLM does not find, since transformers' own class of the model has them
under other names, or since it looks in another place.
"""

import importlib
from typing import Any

from . import add_config, mends


@mends(
    "vllm.config.speculative",
    "SpeculativeConfig.hf_config_override",
    hashes="f76018dfca8e 8ed0edd97fdd cb1df17ca6a8",
)
def nemotron_omni_draft(module: Any) -> None:
    """The draft's config is made of text_config, without the quantization_config next to it."""
    own = module.SpeculativeConfig.hf_config_override

    def hf_config_override(hf_config: Any, **kwargs: Any) -> Any:
        quantization = getattr(hf_config, "quantization_config", None)
        found = own(hf_config, **kwargs)
        if quantization and not getattr(found, "quantization_config", None):
            found.quantization_config = quantization
        return found

    module.SpeculativeConfig.hf_config_override = staticmethod(hf_config_override)


@mends(
    "vllm.model_executor.models.nano_nemotron_vl",
    "NemotronH_Nano_VL_V2.__init__",
    hashes="2886ccfb8c6e d619ee4742f9",
)
def nemotron_omni_vision(module: Any) -> None:
    """transformers' class has vit_hidden_size as vision_hidden_size."""
    init = module.NemotronH_Nano_VL_V2.__init__

    def __init__(self: Any, *, vllm_config: Any, prefix: str = "") -> None:
        config = vllm_config.model_config.hf_config
        if not hasattr(config, "vit_hidden_size"):
            config.vit_hidden_size = config.vision_hidden_size
        init(self, vllm_config=vllm_config, prefix=prefix)

    module.NemotronH_Nano_VL_V2.__init__ = __init__


@mends("vllm.transformers_utils.config", "get_config", hashes="45551a5f8f7e")
def bailing_head_dim(module: Any) -> None:
    """transformers 5.20 has a class of bailing_hybrid whose head_dim is that of MLA's rotary part;
    the release's, which vLLM reads for linear attention, is in linear_head_dim.
    """
    transformers: Any = importlib.import_module("transformers")
    if not hasattr(transformers, "BailingHybridConfig"):
        return

    class ReleasedHeadDim(transformers.BailingHybridConfig):
        def __post_init__(self, **kwargs: Any) -> None:
            super().__post_init__(**kwargs)
            self.head_dim = self.linear_head_dim

    add_config(module, "bailing_hybrid", ReleasedHeadDim)
