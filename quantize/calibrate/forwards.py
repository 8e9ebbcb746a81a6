"""The three ways a layer computes: while it is calibrated, for the next layer's inputs, and as a server would.

In: a model of which one layer is real, or an MTP block. Out: contexts to call its forward in.

Easy to get wrong: `norm_calibration_context` leaves zero-centred norms rounded to what 1 + weight can hold. Whoever
uses it takes `small_parameters` before and calls `restore` afterwards. And everything runs under no_grad, never
inference_mode (llm-compressor #2745).

Source: llm-compressor 0.14.0.1, compressed-tensors 0.19.0.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationStatus, enable_quantization
from compressed_tensors.quantization.lifecycle.forward import forward_quantize
from compressed_tensors.utils import patch_attr
from llmcompressor.modeling.moe.context import moe_calibration_context
from llmcompressor.modeling.offset_norm import norm_calibration_context
from llmcompressor.utils import calibration_forward_context
from llmcompressor.utils.helpers import DisableQuantization, disable_cache, disable_hf_kernels, eval_context
from torch import Tensor

from ...checkpoints import dequantize
from ...recipes.schemes import SCHEMES
from ..pack import pack_alone


@contextmanager
def calibrating(model: Any) -> Iterator[None]:
    """The forward of calibration: no_grad, eager attention, every expert on every token."""
    with moe_calibration_context(), calibration_forward_context(model):
        yield


@contextmanager
def propagating(model: Any) -> Iterator[None]:
    """Computes the layer's outputs as llm-compressor hands them on: rewritten weights, no rounding, eager attention.

    Every expert computes every token, so that sums are the same to the bit; the router still chooses whose output
    counts. Zero-centred norms are modules of another class meanwhile, with 1 + weight rounded: their hooks do not fire.
    """
    before = small_parameters(model)
    try:
        with norm_calibration_context(model), calibrating(model), DisableQuantization(model):
            yield
    finally:
        # 1 + weight in BF16 loses bits of a zero-centred weight, and taking the 1 away does not bring them back.
        restore(model, before)


@contextmanager
def serving(model: Any) -> Iterator[None]:
    """Computes as a server would: weights and activations rounded, experts for their own tokens only.

    On a CPU every expert computes every token, with the same results: a matrix of another height for each expert and
    batch is another compiled kernel of oneDNN's, and these fill the memory.

    Weights are rounded once, where compressed-tensors would round them in every call, and stay so: nothing that needs
    them as they were may come afterwards.
    """
    with torch.no_grad(), disable_cache(model), eval_context(model), disable_hf_kernels(model), ExitStack() as stack:
        model.apply(enable_quantization)
        if all(value.device.type in ("cpu", "meta") for value in model.parameters()):
            stack.enter_context(moe_calibration_context())
        for module in model.modules():
            scheme = getattr(module, "quantization_scheme", None)
            if scheme is not None and scheme.weights is not None:
                module.weight.data = _rounded(module)
                # What is compressed is not rounded again.
                stack.enter_context(patch_attr(module, "quantization_status", QuantizationStatus.COMPRESSED))
        yield


def small_parameters(model: Any) -> dict[str, Tensor]:
    """Copies of the norms' weights and of all biases: what contexts and smoothings may change besides matrices."""
    return {
        name: value.detach().clone()
        for name, value in model.named_parameters()
        if value.ndim == 1 and not value.is_meta and name.rsplit(".", 1)[-1] in ("weight", "bias")
    }


def restore(model: Any, values: Mapping[str, Tensor]) -> None:
    """Puts parameters back where they differ from `values`."""
    now = dict(model.named_parameters())
    for name, value in values.items():
        if not torch.equal(now[name], value):
            now[name].data.copy_(value)


def _rounded(module: Any) -> Tensor:
    """A weight as it will be served. NVFP4 by keepmtp's own kernel, which takes a tenth of compressed-tensors' time."""
    scheme = module.quantization_scheme
    if scheme.format == "nvfp4-pack-quantized":
        packed = pack_alone(SCHEMES["NVFP4A16"], module.weight.data, module.weight_global_scale.data)
        scale = packed["weight_scale"]
        # Scales that an algorithm chose are not those of the largest magnitudes.
        if torch.equal(scale.float(), module.weight_scale.data.float()):
            parts = packed["weight_packed"], scale, packed["weight_global_scale"]
            return dequantize.nvfp4(*parts, divisor=True).to(module.weight.dtype)
    return forward_quantize(module, module.weight.data, "weight", scheme.weights)
