"""BF16 products summed in F32 and rounded at the end, which is what they are anyway: where a
processor has no instructions for BF16, PyTorch's own take twelve times as long.

As a program it is the command `keepmtp` with such products.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def multiply_in_f32(put: Callable[[object, str, object], object] = setattr) -> None:
    """Put it in the place of PyTorch's, in this process and those that are forked from it."""
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        for holder, name in ((F, "linear"), (torch, "matmul"), (torch, "bmm")):
            put(holder, name, partial(_in_f32, getattr(holder, name)))


def _in_f32(original: Callable[..., Tensor], *given: Any, bias: Tensor | None = None) -> Tensor:
    parts = [*given, *([] if bias is None else [bias])]
    if parts[0].dtype != torch.bfloat16:
        return original(*parts)
    return original(*(None if each is None else each.float() for each in parts)).bfloat16()


if __name__ == "__main__":
    from keepmtp.cli.main import main

    multiply_in_f32()
    main()
