"""The three ways a layer computes: while it is calibrated, for the next layer's inputs, and as a
server would.

In: a model of which one layer is real, or an MTP block. Out: contexts to call its forward in.

Easy to get wrong: `norm_calibration_context` leaves zero-centred norms rounded to what 1 + weight
can hold. Whoever uses it takes `small_parameters` before and calls `restore` afterwards. And
everything runs under no_grad, or with gradients, never in inference_mode (llm-compressor #2745).

Source: llm-compressor 0.14.0.1, compressed-tensors 0.19.0.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stderr
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationStatus
from llmcompressor.modeling.moe.context import moe_calibration_context
from llmcompressor.modeling.offset_norm import norm_calibration_context
from llmcompressor.utils import calibration_forward_context
from llmcompressor.utils.helpers import disable_cache, disable_hf_kernels, eval_context
from torch import Tensor

from .activations import rounded_inputs
from .caches import rounded_caches


@contextmanager
def calibrating(model: Any, *, routed: bool = False) -> Iterator[None]:
    """The forward of calibration: no_grad, eager attention, every expert on every token, or
    `routed` on its own.
    """
    with nullcontext() if routed else moe_calibration_context(), calibration_forward_context(model):
        yield


@contextmanager
def propagating(model: Any, *, routed: bool = False) -> Iterator[None]:
    """Computes the layer's outputs as llm-compressor hands them on: rewritten weights, no rounding,
    eager attention.

    Every expert computes every token, so that sums are the same to the bit; the router still
    chooses whose output counts. Where statistics are `routed`, each computes its own, as it did
    while they were taken. Zero-centred norms are modules of another class meanwhile, with 1 +
    weight rounded: their hooks do not fire.
    """
    before = small_parameters(model)
    try:
        with norm_calibration_context(model), calibrating(model, routed=routed):
            yield
    finally:
        # 1 + weight in BF16 loses bits of a zero-centred weight, and taking the 1 away does not
        # bring them back.
        restore(model, before)


@contextmanager
def serving(model: Any, *, trains: bool = False) -> Iterator[None]:
    """Computes as a server would: weights, activations and FP8 caches rounded, experts for their
    own tokens only.

    Where it `trains`, gradients are kept, and pass activations as if these were not rounded.

    Quantized modules have their served weights already (`served.serve_weights`).
    """
    quantized = {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "quantization_scheme")
    }
    for name, module in quantized.items():
        assert module.quantization_status == QuantizationStatus.COMPRESSED, (
            f"{name}: no served weight"
        )
    gradients = torch.enable_grad() if trains else torch.no_grad()
    with gradients, released(model), rounded_inputs(quantized.values()), rounded_caches(model):
        yield


@contextmanager
def released(model: Any) -> Iterator[None]:
    """Computes in transformers' own operators, as the model does that is in it; with gradients
    where a caller has them.

    On a CPU every expert computes every token, with the same results: a matrix of another height
    for each expert and batch is another compiled kernel of oneDNN's, and these fill the memory.
    """
    is_on_cpu = all(value.device.type in ("cpu", "meta") for value in model.parameters())
    experts = moe_calibration_context() if is_on_cpu else nullcontext()
    with disable_cache(model), eval_context(model), disable_hf_kernels(model), experts:
        yield


def small_parameters(model: Any) -> dict[str, Tensor]:
    """Copies of the norms' weights and of all biases: what contexts and smoothings may change
    besides matrices.
    """
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


@contextmanager
def without_bars() -> Iterator[None]:
    """tqdm has no switch after its import, but writes to what sys.stderr is at that moment."""
    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stderr(nowhere):
        yield
