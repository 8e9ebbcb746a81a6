"""Which norms and projections AWQ and SmoothQuant may rescale without changing what a layer computes, and the proof.

In: a model with one real layer and a function that runs a batch through it. Out: `Smoothing`s, each a module whose
output channels are divided by a scale and the modules whose input channels take that scale in return.

They are read off the running layer, not from tables by class name: a norm's consumers are the modules that are handed
its output. Tables miss modules (llm-compressor 0.14.0.1's AWQ table for Glm4MoeForCausalLM forgets the shared experts
and its SmoothQuant table the router) and have no row for an MTP block.

Easy to get wrong: scaling by powers of two is exact in floating point, so a right smoothing leaves every output equal
bit for bit and needs no tolerance; with the algorithm's own scales only rounding may remain. Both are checked: the
first before (what fails is left alone), the second afterwards (what fails is an error).
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from llmcompressor.modeling.offset_norm import norm_calibration_context
from llmcompressor.modifiers.transform.awq.base import get_lowest_common_ancestor_with_avoid
from llmcompressor.utils.helpers import DisableQuantization
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ....recipes.errors import CheckpointError
from ...run.ranks import gathered
from ..model.hooks import hooked
from .forwards import calibrating, restore, small_parameters
from .work import LayerWork, Smoothing

# Rows kept of each module's output: enough to see any wrong channel, and 256 experts stay below a GiB.
_ROWS = 64
# Exponents of the probe's scales: wide enough to run into every clamp, far from the ends of BF16's range.
_EXPONENTS = {torch.float16: 2}
_WIDE_EXPONENTS = 12
# A projection that is linear in another's output, by the names of the two in one parent.
_PAIRS = (("v_proj", "o_proj"), ("up_proj", "down_proj"), ("w3", "w2"))

RunBatch = Callable[[], None]
Outputs = Mapping[str, tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Smoothings:
    """What of a layer is rescaled.

    Attributes:
        found: in the order in which the layer computes them.
        left_out: a sentence for each one that would have changed the layer's function.
        reference: what modules computed before.
        plain: copies of the parameters that may be rescaled in modules that are not quantized.
    """

    found: tuple[Smoothing, ...] = ()
    left_out: tuple[str, ...] = ()
    reference: Outputs
    plain: Mapping[str, Tensor]

    @property
    def touched(self) -> list[str]:
        """Modules whose weights are rescaled."""
        return [name for smoothing in self.found for name in (smoothing.smooth, *smoothing.balance)]

    @property
    def rescaled(self) -> set[str]:
        """Parameters that are rescaled."""
        return {f"{name}.weight" for name in self.touched} | {f"{smoothing.smooth}.bias" for smoothing in self.found}


def smoothings_of(model: Any, run: RunBatch, work: LayerWork) -> Smoothings:
    """The smoothings that leave the layer's function as it is, or those of `work`.

    Args:
        model: one real layer; modules without weights (or with weights on meta) are passed over.
        run: one batch through the model.
        work: a smoothing feeds at least one of the modules that its algorithm rewrites, and touches none whose bytes
            come from elsewhere.
    """
    before = small_parameters(model)
    with calibrating(model), DisableQuantization(model):
        reference = observe(model, run, work.rewritten)
        found, left_out = tuple(work.smoothings or ()), ()
        if work.smoothings is None:
            with norm_calibration_context(model):
                of_ranks = gathered(_find(model, run, work))  # each looks at a batch of its own
            found = tuple(each for each in of_ranks[0][0] if all(each in other for other, _ in of_ranks))
            left_out = tuple(dict.fromkeys(reason for _, reasons in of_ranks for reason in reasons))
    if work.algorithm == "awq":
        found, doubled = one_a_parent(model, found)
        left_out += doubled
    restore(model, before)
    whole = Smoothings(found=found, left_out=left_out, reference=reference, plain={})
    parameters = {
        f"{name}.{key}": value.detach().clone()
        for name in whole.touched
        if name not in work.schemes
        for key, value in model.get_submodule(name).named_parameters(recurse=False)
    }
    return replace(whole, plain=parameters)


def _find(model: Any, run: RunBatch, work: LayerWork) -> tuple[list[Smoothing], list[str]]:
    """The smoothings in the order of calls, and a sentence for each one that was left out."""
    rewritten = {*work.rewritten}
    untouchable = {*work.frozen, *work.schemes.keys() - rewritten}
    candidates, calls = _candidates(model, run, norms_only=work.algorithm == "smoothquant")
    reference = observe(model, run, work.rewritten)
    kept: list[Smoothing] = []
    left_out: list[str] = []
    for candidate in candidates:
        group: list[Smoothing] = []
        for smoothing in candidate:
            fixed = [name for name in (smoothing.smooth, *smoothing.balance) if name in untouchable]
            if rewritten.isdisjoint(smoothing.balance):
                continue
            if fixed:
                left_out.append(f"{smoothing.smooth}: it or what it feeds is kept in other bytes ({fixed[-1]})")
            else:
                group.append(smoothing)
        if not group:
            continue
        with _powers_of_two(model, group):
            changed = _changed(reference, observe(model, run, work.rewritten), {each.smooth for each in group})
        if changed:
            left_out += [f"{smoothing.smooth}: scaling it would change what {changed} computes" for smoothing in group]
        else:
            kept += group
    return sorted(kept, key=lambda smoothing: calls[smoothing.smooth]), left_out


def one_a_parent(model: Any, found: Sequence[Smoothing]) -> tuple[tuple[Smoothing, ...], tuple[str, ...]]:
    """AWQ replays the module around what it balances, and keeps that module's arguments for one smoothing only.

    Source: llm-compressor 0.14.0.1 modifiers/transform/awq/base.py (`_parent_args_cache`), a KeyError otherwise.
    """
    by_parent: dict[str, Smoothing] = {}
    left_out: list[str] = []
    for smoothing in found:
        parent, _ = get_lowest_common_ancestor_with_avoid(iter(smoothing.balance), model)
        if by_parent.setdefault(parent, smoothing) is not smoothing:
            left_out.append(f"{smoothing.smooth}: another smoothing is judged by {parent} already")
    return tuple(by_parent.values()), tuple(left_out)


def observe(model: Any, run: RunBatch, names: Iterable[str]) -> Outputs:
    """The first rows of what each module with a matrix computes, and of every module that holds all of `names`.

    Of a router that is its logits, if it returns them: which experts it takes is not continuous in them.

    Returns: module name -> its output tensors [rows, channels] ("" is the model's own output).
    """
    outputs: dict[str, tuple[Tensor, ...]] = {}
    widths: dict[str, int | None] = dict.fromkeys(_holders(names))
    widths |= {name: module.weight.shape[0] for name, module in _matrices(model).items()}

    def keep(name: str, width: int | None, _module: object, _args: object, output: object) -> None:
        leaves = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.ndim and not x.is_meta]
        outputs[name] = tuple(
            leaf.detach().reshape(-1, leaf.shape[-1])[:_ROWS].clone()
            for leaf in leaves
            if width in (None, leaf.shape[-1]) and leaf.is_floating_point()
        )

    hooks = {name: partial(keep, name, width) for name, width in widths.items()}
    with hooked(model.get_submodule(name).register_forward_hook(hook) for name, hook in hooks.items()):
        run()
    return outputs


def check_smoothed(model: Any, run: RunBatch, work: LayerWork, smoothings: Smoothings) -> None:
    """Raises CheckpointError naming the first module whose output is no longer what it was, up to rounding.

    The norms are those of the checkpoint again: while a zero-centred one was replaced, it lost bits to the subtraction
    of its 1.

    Tolerance: a product was rounded in both its factors, each by eps / 2 of its size at worst and a quarter of eps on
    average, and the errors of the modules before it arrive with the input: 128 such roundings in quadrature come to
    less than 4 eps, which is granted. Modules that hold the layer are granted 32 eps: there a token near a tie may have
    gone to another expert. What is missing from a smoothing changes outputs by the scale itself.
    """
    # The coarsest of the rescaled weights (2^-7 for BF16), whatever the outputs' dtype is.
    eps = max((torch.finfo(model.get_submodule(name).weight.dtype).eps for name in smoothings.touched), default=0.0)
    smoothed = {smoothing.smooth for smoothing in smoothings.found}
    with calibrating(model), DisableQuantization(model):
        after = observe(model, run, work.rewritten)
    for name, tensors in smoothings.reference.items():
        if name in smoothed:
            continue
        is_holder = not name or any(other.startswith(f"{name}.") for other in smoothings.reference)
        tolerance = max(4 * eps, 1e-4) * (8 if is_holder else 1)
        for was, now in zip(tensors, after[name], strict=True):
            error = float((now.float() - was.float()).norm() / was.float().norm().clamp(min=1e-30))
            if not error <= tolerance:
                blamed = [s.smooth for s in smoothings.found if name in s.balance] or sorted(smoothed)
                raise CheckpointError(
                    name or "the model",
                    f"a layer must compute what it computed before {', '.join(blamed[:3])} was rescaled",
                    got=f"a relative change of {error:.2g} (rounding explains {tolerance:.2g})",
                    cure="Something that it feeds was not rescaled, or the layer is not linear there:"
                    " calibrate with gptq or minmax",
                )


def _candidates(model: Any, run: RunBatch, *, norms_only: bool) -> tuple[list[list[Smoothing]], dict[str, int]]:
    """Groups of smoothings to be probed together, and the order of calls: a norm alone, pairs by their kind.

    `norms_only` is SmoothQuant's choice: no pairs of projections, no norms inside attention, and no norm in front of
    routed experts (one scale for all experts unbalances them; llm-compressor 0.14.0.1, smoothquant/utils.py).
    """
    norms, matrices = _norms(model), _matrices(model)
    fed, calls = _consumers(norms, matrices, run)
    groups = []
    for norm, names in fed.items():
        consumers = tuple(name for name in names if matrices[name].weight.shape[1] == norms[norm].weight.numel())
        is_routed = any(".experts." in name for name in consumers)
        # A norm inside a low-rank projection has the parent of a module that it feeds.
        is_inner = any(name.rpartition(".")[0] == norm.rpartition(".")[0] for name in consumers)
        if consumers and not (norms_only and (is_routed or is_inner)):
            groups.append([Smoothing(smooth=norm, balance=consumers)])
    if not norms_only:
        groups += [_pairs(matrices, calls, first, second) for first, second in _PAIRS]
    return groups, calls


def _consumers(
    norms: Mapping[str, Any], matrices: Mapping[str, Any], run: RunBatch
) -> tuple[dict[str, list[str]], dict[str, int]]:
    """Norm -> the matrices that read its output in a run, and the order in which modules are called."""
    produced: dict[int, str] = {}
    alive: list[Tensor] = []
    fed: dict[str, list[str]] = {name: [] for name in norms}
    calls: dict[str, int] = {}

    def after_norm(name: str, norm: Any, _args: object, output: object) -> None:
        calls.setdefault(name, len(calls))
        if isinstance(output, Tensor) and output.shape[-1] == norms[name].weight.numel():
            # The reference keeps the storage from being reused, so that its address stays this norm's.
            alive.append(output)
            produced[output.untyped_storage().data_ptr()] = name

    def before_matrix(name: str, matrix: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        calls.setdefault(name, len(calls))
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor) and value.shape[-1] == matrix.weight.shape[1]:
                source = produced.get(value.untyped_storage().data_ptr())
                if source is not None and name not in fed[source]:
                    fed[source].append(name)

    handles = [module.register_forward_hook(partial(after_norm, name)) for name, module in norms.items()]
    for name, module in matrices.items():
        handles.append(module.register_forward_pre_hook(partial(before_matrix, name), with_kwargs=True))
    with hooked(handles):
        run()
    return fed, calls


def _pairs(matrices: Mapping[str, Any], calls: Mapping[str, int], first_leaf: str, second_leaf: str) -> list[Smoothing]:
    """Smoothings between two projections of one parent that were both called and have matching widths."""
    found = []
    for first in matrices:
        parent, _, leaf = first.rpartition(".")
        second = f"{parent}.{second_leaf}".lstrip(".")
        if leaf != first_leaf or first not in calls or second not in calls:
            continue
        if matrices[first].weight.shape[0] == matrices[second].weight.shape[1]:
            found.append(Smoothing(smooth=first, balance=(second,)))
    return found


def _norms(model: Any) -> dict[str, Any]:
    """Modules that own a vector `weight` and nothing else but a `bias`."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(weight := getattr(module, "weight", None), Tensor)
        and weight.ndim == 1
        and not weight.is_meta
        and {key for key, _ in module.named_parameters()} <= {"weight", "bias"}
    }


def _matrices(model: Any) -> dict[str, Any]:
    """Modules that own a matrix `weight` with input channels in its columns: linear layers and routers."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(weight := module._parameters.get("weight"), Tensor)
        and weight.ndim == 2
        and not weight.is_meta
        and not isinstance(module, nn.Embedding)
    }


def _holders(names: Iterable[str]) -> list[str]:
    """The modules that hold all of `names`, the model ("") first."""
    common: list[str] = []
    for parts in zip(*(name.split(".")[:-1] for name in names), strict=False):
        if len({*parts}) > 1:
            break
        common.append(parts[0])
    return [".".join(common[:level]) for level in range(len(common) + 1)]


@contextmanager
def _powers_of_two(model: Any, smoothings: Sequence[Smoothing]) -> Iterator[None]:
    """Applies each smoothing with random powers of two, exactly, and puts the weights back afterwards."""
    saved: list[tuple[Tensor, Tensor]] = []
    generator = torch.Generator().manual_seed(0)
    try:
        for smoothing in smoothings:
            smooth = model.get_submodule(smoothing.smooth)
            balance = [model.get_submodule(name) for name in smoothing.balance]
            limit = _EXPONENTS.get(smooth.weight.dtype, _WIDE_EXPONENTS)
            exponents = torch.randint(-limit, limit + 1, (balance[0].weight.shape[1],), generator=generator)
            scale = torch.exp2(exponents.double()).to(smooth.weight.device)
            changes = [(smooth.weight, 1 / scale if smooth.weight.ndim == 1 else 1 / scale[:, None])]
            if getattr(smooth, "bias", None) is not None:
                changes.append((smooth.bias, 1 / scale))
            changes += [(module.weight, scale) for module in balance]
            for tensor, factor in changes:
                saved.append((tensor, tensor.detach().clone()))
                tensor.data.mul_(factor.to(tensor.dtype))
        yield
    finally:
        for tensor, value in reversed(saved):
            tensor.data.copy_(value)


def _changed(before: Outputs, after: Outputs, smoothed: Collection[str]) -> str:
    """The first module, or "the model", whose output is not the same bit for bit; "" if none."""
    for name, tensors in before.items():
        if name not in smoothed and not all(torch.equal(a, b) for a, b in zip(tensors, after[name], strict=True)):
            return name or "the model"
    return ""
