"""Step-3.5 and Step-3.7: what their drafts look up, and which config class says it."""

import re
from typing import Any

from . import add_config, mends

# What the release's configuration file says where config.json does not.
_VISION: dict[str, Any] = {"use_abs_posemb": True, "use_ln_pre": True, "use_rope2d": True}
_CONSTANT = re.compile(r"\.attn\.(?:[qkv]_scale|[qkv]_zero_point|prob_scale)$")


@mends("vllm.transformers_utils.configs.step3p5", "Step3p5Config.__init__", hashes="120ef9824b37")
def layer_types(module: Any) -> None:
    """The config cuts layer_types to the decoder layers; the draft looks its own up after them.

    Released configs have the MTP layers' types, too: they are kept, as 0.33 keeps them.
    """
    init = module.Step3p5Config.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if kwargs.get("layer_types") is not None:
            self.layer_types = kwargs["layer_types"]

    module.Step3p5Config.__init__ = __init__


@mends("vllm.model_executor.models.step3p5_mtp", "Step3p5MTP.load_weights", hashes="483aefd1e730")
def draft_scales(module: Any) -> None:
    """The draft demands scales and zero points of the KV cache, which compressed-tensors gives it
    as constants; its own comment calls them optional.

    The check for what is missing is made here, without the constants.
    """
    load = module.Step3p5MTP.load_weights
    is_checked = module.is_mtp_completeness_check_enabled

    def load_weights(self: Any, weights: Any) -> set[str]:
        module.is_mtp_completeness_check_enabled = lambda: False
        try:
            loaded = load(self, weights)
        finally:
            module.is_mtp_completeness_check_enabled = is_checked
        for name, _ in self.named_parameters():
            if is_checked() and name not in loaded and not _CONSTANT.search(name):
                raise RuntimeError(f"{name} of the draft is not in the checkpoint")
        return loaded

    module.Step3p5MTP.load_weights = load_weights


@mends(
    "vllm.transformers_utils.config",
    "HFConfigParser.parse",
    hashes="c0d8938a34ea",
)
def config_keys(module: Any) -> None:
    """transformers' own class of Step-3.7 has the number of heads by layer and other keys under new
    names, which vLLM does not look up: it reads the release's keys, as its configuration file
    gives them.
    """
    from transformers import PretrainedConfig

    text = module._CONFIG_REGISTRY["step3p5"]

    class ReleasedKeys(PretrainedConfig):
        model_type = "step3p7"

        def __init__(self, text_config: Any = None, vision_config: Any = None, **kwargs: Any):
            self.text_config = text(**text_config or {})
            # 0.33 has transformers' class here, too: it asks whether there are heads at all, then
            # takes those of each layer.
            self.text_config.allow_global_per_layer_attribute_access = True
            self.vision_config = PretrainedConfig(**_VISION | dict(vision_config or {}))
            super().__init__(**kwargs)

        def get_text_config(self, *args: Any, **kwargs: Any) -> Any:
            return self.text_config

    add_config(module, "step3p7", ReleasedKeys)
