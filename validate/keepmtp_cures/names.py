"""Names of tensors that a loader does not know, or takes for its own."""

from collections.abc import Iterable
from typing import Any

from . import mends


@mends(
    "vllm.model_executor.models.longcat_flash",
    "FlashModel.load_weights",
    hashes="b81813f73810",
)
def longcat_target(module: Any) -> None:
    """The target skips names with `.mtp.` in them, and those that it gets begin with `mtp.`."""
    own = module.FlashModel.load_weights

    def load_weights(self: Any, weights: Iterable[tuple[str, Any]]) -> set[str]:
        # Weights come one at a time: a list would hold all of them.
        of_target = (weight for weight in weights if not weight[0].startswith("mtp."))
        return own(self, of_target)

    module.FlashModel.load_weights = load_weights


@mends(
    "vllm.models.qwen4_exp.common.ngram_embedding",
    "Qwen4ExpPLEEmbeddingMethod.from_quant_config",
    hashes="d27627def61a",
)
def qwen_table(module: Any) -> None:
    """The n-gram table refuses every config of compressed-tensors, whatever it says of the table;
    0.32 builds it plain where no target fits it.
    """
    own = module.Qwen4ExpPLEEmbeddingMethod.from_quant_config

    def from_quant_config(quant_config: Any, prefix: str, *args: Any, **kwargs: Any) -> Any:
        is_ours = bool(quant_config) and quant_config.get_name() == "compressed-tensors"
        if is_ours and not quant_config.get_scheme_dict(None, layer_name=prefix):
            quant_config = None
        return own(quant_config, prefix, *args, **kwargs)

    module.Qwen4ExpPLEEmbeddingMethod.from_quant_config = staticmethod(from_quant_config)
