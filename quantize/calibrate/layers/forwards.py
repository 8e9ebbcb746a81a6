"""The two ways a layer computes: while it is calibrated and for the next layer's inputs, and as a
server would.

In: a model of which one layer is real, or an MTP block. Out: contexts to call its forward in.

Easy to get wrong: `norm_calibration_context` leaves zero-centred norms rounded to what 1 + weight
can hold. Whoever uses it takes `small_parameters` before and calls `restore` afterwards. And
everything runs under no_grad, or with gradients, never in inference_mode: weights that are loaded
inside such a forward are inference tensors, and GPTQ's write to them fails hours later
(llm-compressor #2745).

Source: llm-compressor 0.14.0.1, compressed-tensors 0.19.0 offload/cache/base.py (`__setitem__`, the
write that fails), torch 2.13 autograd/grad_mode.py (`inference_mode`).
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stderr
from functools import partial
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationStatus
from compressed_tensors.utils import patch_attr
from llmcompressor.modeling.moe.context import (
    get_calibrate_all_experts_flag,
    moe_calibration_context,
)
from llmcompressor.modeling.moe.linear_experts import LinearExperts2D
from llmcompressor.utils import calibration_forward_context
from llmcompressor.utils.helpers import disable_cache, disable_hf_kernels, eval_context
from torch import Tensor
from transformers import AttentionInterface

from .activations import rounded_inputs
from .caches import rounded_caches


@contextmanager
def calibrating(model: Any) -> Iterator[None]:
    """The forward of calibration, and of what a layer hands on: rewritten weights, no rounding of
    activations, no_grad, eager attention.

    Every expert computes every token, so that sums are the same to the bit; the router still
    chooses whose output counts.
    """
    with (
        adapted(),
        moe_calibration_context(),
        calibration_forward_context(model),
    ):
        yield


@contextmanager
def serving(model: Any, *, trains: bool = False) -> Iterator[None]:
    """Computes as a server would: weights, activations and FP8 caches rounded, experts for their
    own tokens only.

    Where it `trains`, gradients are kept, and pass activations as if these were not rounded.

    Quantized modules have their served weights already (`served.serve_weights`).
    """
    quantized = []
    for module in model.modules():
        if hasattr(module, "quantization_scheme"):
            assert module.quantization_status == QuantizationStatus.COMPRESSED, "no served weight"
            quantized.append(module)
    gradients = torch.set_grad_enabled(trains)
    with gradients, released(model), rounded_inputs(quantized), rounded_caches(model):
        yield


@contextmanager
def released(model: Any) -> Iterator[None]:
    """Computes in transformers' own operators, as the model does that is in it; with gradients
    where a caller has them.

    On a CPU every expert computes every token, with the same results: a matrix of another height
    for each expert and batch is another compiled kernel of oneDNN's, and these fill the memory.
    """
    experts = nullcontext()
    if {value.device.type for value in model.parameters()} <= {"cpu", "meta"}:
        experts = moe_calibration_context()
    with (
        adapted(),
        disable_cache(model),
        eval_context(model),
        disable_hf_kernels(model),
        experts,
    ):
        yield


@contextmanager
def adapted() -> Iterator[None]:
    """A forward that enters `torch.inference_mode` computes under `torch.no_grad` meanwhile, its
    eager attention takes one sequence of a batch after the other, and one sort says which tokens
    its experts get.

    So no more scores are there than those of one sequence, and the weights, which nobody reads, are
    freed at once. The bits are those of the batch wherever a product's do not depend on how many
    there are. And the CPU waits for a GPU once a layer, not once an expert.
    """

    def enter(self: Any) -> None:
        self._inference_mode_context = torch.set_grad_enabled(not self.mode)

    # The class itself is changed, because a forward enters it from its source, or from a
    # decorator's closure that nobody else can reach: a forward on the instance is passed over by
    # `super().forward` and by llm-compressor's wrapper, which look it up on the class (checked
    # against torch 2.13, compressed-tensors 0.19.0 offload/module.py). And a function that is
    # registered with transformers is not handed the model file's own eager attention (5.17).
    with (
        patch_attr(torch.inference_mode, "__enter__", enter),
        patch_attr(
            AttentionInterface,
            "get_interface",
            lambda _registry, _name, eager: partial(_attend_in_turn, eager),
        ),
        patch_attr(LinearExperts2D, "forward", _experts_in_turn),
    ):
        yield


def _attend_in_turn(eager: Any, module: Any, *states: Any, **given: Any) -> Any:
    """What eager attention returns of queries, keys, values and their mask, without its weights."""
    size = len(states[0])
    parts = []
    for value in states:
        if value is None or len(value) < size:  # the same for every sequence, as a mask may be
            parts.append([value] * size)
        else:
            # A part that `split` makes has a gradient of its own size, a slice one of the batch's.
            parts.append(value.split(1))
    outputs = []
    for of_sequence in zip(*parts, strict=True):
        outputs.append(eager(module, *of_sequence, **given)[0])
    return torch.cat(outputs), None


def _experts_in_turn(
    experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """What `LinearExperts2D.forward` returns (llm-compressor 0.14.0.1, modeling/moe), to the bit.

    It asks for the tokens of each expert, for which the CPU waits; here one sort answers for all of
    them, in the same order: by the router's choice, then by the token.

    Args:
        experts: a list of them.
        hidden_states: [tokens, H].
        top_k_index: [tokens, choices] int64, the expert's number.
        top_k_weights: the same shape.
    """
    chosen = top_k_index.T.flatten()
    places = chosen.argsort(stable=True)
    all_tokens = places % len(hidden_states)
    all_weights = top_k_weights[all_tokens, places // len(hidden_states), None]
    counts = chosen.bincount(minlength=experts.num_experts).tolist()
    of_expert = [*zip(all_tokens.split(counts), all_weights.split(counts), strict=True)]
    total = torch.zeros_like(hidden_states)
    for index in range(experts.num_experts):  # the list has more than experts
        tokens, weights = of_expert[index]
        if get_calibrate_all_experts_flag():
            output = experts[index](hidden_states)[tokens]
        else:
            output = experts[index](hidden_states[tokens])
        total.index_add_(0, tokens, (output * weights).to(total.dtype))
    return total


def small_parameters(model: Any) -> dict[str, Tensor]:
    """Copies of the norms' weights and of all biases: what contexts and smoothings may change
    besides matrices.
    """
    copies = {}
    for name, value in model.named_parameters():
        leaf = name.rpartition(".")[2]
        if leaf in ("weight", "bias") and value.ndim == 1 and not value.is_meta:
            copies[name] = value.detach().clone()
    return copies


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
