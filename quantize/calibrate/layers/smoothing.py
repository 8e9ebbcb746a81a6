"""Which norms and projections AWQ and SmoothQuant may rescale without changing what a layer
computes.

In: a model with one real layer and a function that runs a batch through it. Out: `Smoothing`s, each
a module whose output channels are divided by a scale and the modules whose input channels take that
scale in return.

They are read off the running layer, not from tables by class name: a norm's consumers are the
modules that are handed its output. Tables miss modules (llm-compressor 0.14.0.1's AWQ table for
Glm4MoeForCausalLM forgets the shared experts and its SmoothQuant table the router) and have no row
for an MTP block.

Easy to get wrong: scaling by powers of two is exact in floating point, so a right smoothing leaves
every output equal bit for bit and needs no tolerance. Each is tried so, and what fails is left
alone.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from llmcompressor.modeling.offset_norm import norm_calibration_context
from llmcompressor.modifiers.transform.awq.base import get_lowest_common_ancestor_with_avoid
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ....recipes.frozen import frozen
from ...run.ranks import gathered
from ..model.hooks import hooked, modules_of
from .forwards import calibrating, restore, small_parameters
from .work import LayerWork

# Rows kept of each module's output: enough to see any wrong channel, and 256 experts stay below a
# GiB.
_ROWS = 64
# Exponents of the probe's scales: wide enough to run into every clamp, far from the ends of BF16's
# range.
_EXPONENTS = 12
# A projection that is linear in another's output, by the names of the two in one parent.
_PAIRS = (("v_proj", "o_proj"), ("up_proj", "down_proj"), ("w3", "w2"))

Arguments = Mapping[str, Tensor]


@frozen
class Smoothing:
    """`smooth`'s output channels are divided by a scale that `balance`'s input channels are
    multiplied by.
    """

    smooth: str
    balance: tuple[str, ...]

    @property
    def touched(self) -> tuple[str, ...]:
        """Modules whose weights are rescaled."""
        return (self.smooth, *self.balance)


def smoothings_of(
    model: Any, batches: Iterable[Arguments], work: LayerWork
) -> tuple[Smoothing, ...]:
    """The smoothings that leave the layer's function as it is, in the order in which it computes.

    Args:
        model: one real layer; modules without weights (or with weights on meta) are passed over.
        batches: the first is tried.
        work: a smoothing feeds at least one of the modules that its algorithm rewrites, and touches
            none whose bytes come from elsewhere.
    """
    batch = next(iter(batches))
    before = small_parameters(model)
    found = []
    rewritten = {*work.rewritten}
    untouchable = {*work.frozen, *work.schemes.keys() - rewritten}
    with calibrating(model), norm_calibration_context(model):
        candidates, calls = _candidates(model, batch, work)
        reference = _observe(model, batch, work)
        for candidate in candidates:
            group = []
            for smoothing in candidate:
                feeds = not rewritten.isdisjoint(smoothing.balance)
                if feeds and untouchable.isdisjoint(smoothing.touched):
                    group.append(smoothing)
            if not group:
                continue
            with _powers_of_two(model, group):
                outputs = _observe(model, batch, work)
            # Its own output is another one, as it should be.
            others = outputs.keys() - {smoothing.smooth for smoothing in group}
            if all(_are_equal(outputs[name], reference[name]) for name in others):
                found += group
    restore(model, before)
    found.sort(key=lambda smoothing: calls[smoothing.smooth])
    of_ranks = gathered(found)  # each rank looks at a batch of its own
    agreed = {}
    for smoothing in of_ranks[0]:
        key: object = smoothing
        # AWQ replays the module around what it balances, and keeps that module's arguments for one
        # smoothing only (llm-compressor 0.14.0.1 modifiers/transform/awq/base.py,
        # `_parent_args_cache`: a KeyError otherwise).
        if work.algorithm == "awq":
            key, _ = get_lowest_common_ancestor_with_avoid(iter(smoothing.balance), model)
        if all(smoothing in others for others in of_ranks):
            agreed.setdefault(key, smoothing)
    return tuple(agreed.values())


def _are_equal(outputs: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """To the bit."""
    return all(map(torch.equal, outputs, expected))


def _observe(model: Any, batch: Arguments, work: LayerWork) -> dict[str, list[Tensor]]:
    """The first rows of what each module with a matrix computes, and the layer and the model.

    Returns: module name -> its output tensors [rows, channels] ("" is the model's own output).
    """
    outputs = {}

    def keep(name: str, _module: object, _args: object, output: object) -> None:
        rows = []
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.ndim and not leaf.is_meta:
                rows.append(leaf.detach().reshape(-1, leaf.shape[-1])[:_ROWS].clone())
        outputs[name] = rows

    handles = []
    modules = modules_of(model, {"", work.path.removesuffix("."), *_owners(model, 2)})
    for name, module in modules.items():
        handles.append(module.register_forward_hook(partial(keep, name)))
    with hooked(handles):
        model(**batch)
    return outputs


def _candidates(
    model: Any, batch: Arguments, work: LayerWork
) -> tuple[list[list[Smoothing]], dict[str, int]]:
    """Groups of smoothings to be probed together, and the order of calls: a norm alone, pairs by
    their kind.

    SmoothQuant has no pairs of projections, and before INT8 no norms inside attention and none in
    front of routed experts (one scale for all experts unbalances them; llm-compressor 0.14.0.1,
    smoothquant/utils.py). NVFP4's groups have scales of their own.
    """
    norms_only = work.algorithm == "smoothquant"
    is_int8 = norms_only and "W8A8" in work.schemes.values()
    matrices = _owners(model, 2)
    fed, calls = _consumers(model, batch, matrices)
    groups = []
    for norm, consumers in fed.items():
        parents = {name.rpartition(".")[0] for name in consumers}
        # A norm inside a low-rank projection has the parent of a module that it feeds.
        is_inner = norm.rpartition(".")[0] in parents
        is_routed = ".experts." in " ".join(consumers)
        if consumers and not (is_int8 and (is_routed or is_inner)):
            groups.append([Smoothing(smooth=norm, balance=tuple(consumers))])
    if norms_only:
        return groups, calls
    for first_leaf, second_leaf in _PAIRS:
        pairs = []
        for first in matrices:
            parent, dot, leaf = first.rpartition(".")
            second = f"{parent}{dot}{second_leaf}"
            if leaf != first_leaf or second not in matrices or not {first, second} <= calls.keys():
                continue
            if len(matrices[first].weight) == matrices[second].weight.shape[1]:
                pairs.append(Smoothing(smooth=first, balance=(second,)))
        groups.append(pairs)
    return groups, calls


def _consumers(
    model: Any, batch: Arguments, matrices: Mapping[str, Any]
) -> tuple[dict[str, list[str]], dict[str, int]]:
    """Norm -> the matrices that read all of its output, and the order of calls."""
    # The tensor keeps the storage from being reused, so that its address stays this norm's.
    produced = {}
    norms = _owners(model, 1)
    fed: dict[str, list[str]] = {name: [] for name in norms}
    calls = {}

    def after_norm(name: str, norm: Any, _args: object, output: object) -> None:
        calls.setdefault(name, len(calls))
        if isinstance(output, Tensor) and output.shape[-1] == norm.weight.numel():
            produced[output.untyped_storage().data_ptr()] = name, output

    def before_matrix(name: str, matrix: Any, args: tuple, kwargs: dict) -> None:
        calls.setdefault(name, len(calls))
        width = matrix.weight.shape[1]
        for value in (*args, *kwargs.values()):
            if not isinstance(value, Tensor) or value.shape[-1:] != (width,):
                continue
            norm, output = produced.get(value.untyped_storage().data_ptr(), ("", value[..., :0]))
            if output.shape[-1] == width and name not in fed[norm]:
                fed[norm].append(name)

    handles = []
    for name, norm in norms.items():
        handles.append(norm.register_forward_hook(partial(after_norm, name)))
    for name, module in matrices.items():
        hook = partial(before_matrix, name)
        handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
    with hooked(handles):
        model(**batch)
    return fed, calls


def _owners(model: Any, ndim: int) -> dict[str, Any]:
    """Modules that own a vector `weight` and nothing but a `bias` (norms), or a matrix (linear
    layers, routers).
    """
    found = {}
    for name, module in model.named_modules():
        own = dict(module.named_parameters())
        weight = own.get("weight")
        if weight is None or weight.is_meta or weight.ndim != ndim:
            continue
        if not isinstance(module, nn.Embedding) and (ndim == 2 or own.keys() <= {"weight", "bias"}):
            found[name] = module
    return found


@contextmanager
def _powers_of_two(model: Any, smoothings: Sequence[Smoothing]) -> Iterator[None]:
    """Applies each smoothing with random powers of two, exactly, and puts the weights back
    afterwards.
    """
    saved = []

    def multiply(tensor: Tensor | None, factor: Tensor) -> None:
        if tensor is not None:
            saved.append((tensor, tensor.detach().clone()))
            tensor.data.mul_(factor.to(tensor.device, tensor.dtype))

    generator = torch.Generator().manual_seed(0)
    try:
        for smoothing in smoothings:
            smooth = model.get_submodule(smoothing.smooth)
            width = len(smooth.weight)
            exponents = torch.randint(-_EXPONENTS, _EXPONENTS + 1, (width,), generator=generator)
            scale = torch.exp2(exponents.double())
            multiply(smooth.weight, (1 / scale).view(-1, *[1] * (smooth.weight.ndim - 1)))
            multiply(getattr(smooth, "bias", None), 1 / scale)
            for name in smoothing.balance:
                multiply(model.get_submodule(name).weight, scale)
        yield
    finally:
        for tensor, value in reversed(saved):
            tensor.data.copy_(value)
