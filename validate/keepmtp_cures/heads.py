"""Heads that vLLM builds without a name, so that no entry of a quantization config can except them.

A head under the name that it has on disk is asked of the config like every other module, and left
plain or quantized as the config says.
"""

import functools
from typing import Any

from . import mends

_ON_DISK = "lm_head"


def _named(module: Any) -> None:
    head = module.ParallelLMHead

    @functools.wraps(head)
    def with_name(*args: Any, prefix: str = "", **kwargs: Any) -> Any:
        return head(*args, prefix=prefix or _ON_DISK, **kwargs)

    module.ParallelLMHead = with_name


@mends(
    "vllm.model_executor.models.exaone_moe",
    "ExaoneMoeForCausalLM.__init__",
    hashes="82e1bc36b82f",
)
def k_exaone(module: Any) -> None:
    """K-EXAONE's target builds its head without a prefix."""
    _named(module)


@mends(
    "vllm.model_executor.models.hy_v3_mtp",
    "HYV3SharedHead.__init__",
    hashes="a83ac0f48681",
)
def hy3_draft(module: Any) -> None:
    """HY3's draft builds its head without a prefix; the target's takes its place after loading."""
    _named(module)
