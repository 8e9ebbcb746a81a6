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

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from llmcompressor.modeling.offset_norm import norm_calibration_context
from llmcompressor.modifiers.transform.awq.base import get_lowest_common_ancestor_with_avoid
from llmcompressor.utils.helpers import DisableQuantization
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ...run.ranks import gathered
from ..model.hooks import hooked
from .forwards import calibrating, restore, small_parameters
from .work import LayerWork

# Rows kept of each module's output: enough to see any wrong channel, and 256 experts stay below a
# GiB.
_ROWS = 64
# Exponents of the probe's scales: wide enough to run into every clamp, far from the ends of BF16's
# range.
_EXPONENTS = {torch.float16: 2}
_WIDE_EXPONENTS = 12
# A projection that is linear in another's output, by the names of the two in one parent.
_PAIRS = (("v_proj", "o_proj"), ("up_proj", "down_proj"), ("w3", "w2"))

RunBatch = Callable[[], None]
Outputs = Mapping[str, tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
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
    model: Any, run: RunBatch, work: LayerWork
) -> tuple[tuple[Smoothing, ...], tuple[str, ...]]:
    """The smoothings that leave the layer's function as it is, in the order in which the layer
    computes them.

    Args:
        model: one real layer; modules without weights (or with weights on meta) are passed over.
        run: one batch through the model.
        work: a smoothing feeds at least one of the modules that its algorithm rewrites, and touches
            none whose bytes come from elsewhere.

    Returns: them, and a sentence for each one that was left out.
    """
    before = small_parameters(model)
    with calibrating(model), DisableQuantization(model), norm_calibration_context(model):
        of_ranks = gathered(_find(model, run, work))  # each looks at a batch of its own
    restore(model, before)
    found = [each for each in of_ranks[0][0] if all(each in other for other, _ in of_ranks)]
    left_out = list(dict.fromkeys(reason for _, reasons in of_ranks for reason in reasons))
    if work.algorithm == "awq":
        # It replays the module around what it balances, and keeps that module's arguments for one
        # smoothing only (llm-compressor 0.14.0.1 modifiers/transform/awq/base.py,
        # `_parent_args_cache`: a KeyError otherwise).
        by_parent: dict[str, Smoothing] = {}
        for smoothing in found:
            parent, _ = get_lowest_common_ancestor_with_avoid(iter(smoothing.balance), model)
            if by_parent.setdefault(parent, smoothing) is not smoothing:
                left_out.append(
                    f"{smoothing.smooth}: another smoothing is judged by {parent} already"
                )
        found = [*by_parent.values()]
    return tuple(found), tuple(left_out)


def _find(model: Any, run: RunBatch, work: LayerWork) -> tuple[list[Smoothing], list[str]]:
    """The smoothings in the order of calls, and a sentence for each one that was left out."""
    rewritten = {*work.rewritten}
    untouchable = {*work.frozen, *work.schemes.keys() - rewritten}
    candidates, calls = _candidates(model, run, norms_only=work.algorithm == "smoothquant")
    reference = _observe(model, run, work)
    kept: list[Smoothing] = []
    left_out: list[str] = []
    for candidate in candidates:
        group: list[Smoothing] = []
        for smoothing in candidate:
            if rewritten.isdisjoint(smoothing.balance):
                continue
            fixed = [name for name in smoothing.touched if name in untouchable]
            if fixed:
                left_out.append(
                    f"{smoothing.smooth}: it or what it feeds is kept in other bytes ({fixed[-1]})"
                )
            else:
                group.append(smoothing)
        if not group:
            continue
        with _powers_of_two(model, group):
            changed = _changed(
                reference, _observe(model, run, work), {each.smooth for each in group}
            )
        if changed:
            left_out += [
                f"{smoothing.smooth}: scaling it would change what {changed} computes"
                for smoothing in group
            ]
        else:
            kept += group
    return sorted(kept, key=lambda smoothing: calls[smoothing.smooth]), left_out


def _observe(model: Any, run: RunBatch, work: LayerWork) -> Outputs:
    """The first rows of what each module with a matrix computes, and of what the layer and the
    model return.

    Of a router that is its logits, if it returns them: which experts it takes is not continuous in
    them.

    Returns: module name -> its output tensors [rows, channels] ("" is the model's own output).
    """
    outputs: dict[str, tuple[Tensor, ...]] = {}
    widths: dict[str, int | None] = {"": None, work.path.removesuffix("."): None}
    widths |= {name: module.weight.shape[0] for name, module in _owners(model, 2).items()}

    def keep(name: str, width: int | None, _module: object, _args: object, output: object) -> None:
        leaves = [
            x for x in tree_leaves(output) if isinstance(x, Tensor) and x.ndim and not x.is_meta
        ]
        outputs[name] = tuple(
            leaf.detach().reshape(-1, leaf.shape[-1])[:_ROWS].clone()
            for leaf in leaves
            if width in (None, leaf.shape[-1]) and leaf.is_floating_point()
        )

    hooks = {name: partial(keep, name, width) for name, width in widths.items()}
    with hooked(
        model.get_submodule(name).register_forward_hook(hook) for name, hook in hooks.items()
    ):
        run()
    return outputs


def _candidates(
    model: Any, run: RunBatch, *, norms_only: bool
) -> tuple[list[list[Smoothing]], dict[str, int]]:
    """Groups of smoothings to be probed together, and the order of calls: a norm alone, pairs by
    their kind.

    `norms_only` is SmoothQuant's choice: no pairs of projections, no norms inside attention, and no
    norm in front of routed experts (one scale for all experts unbalances them; llm-compressor
    0.14.0.1, smoothquant/utils.py).
    """
    norms, matrices = _owners(model, 1), _owners(model, 2)
    fed, calls = _consumers(norms, matrices, run)
    groups = []
    for norm, names in fed.items():
        consumers = tuple(
            name for name in names if matrices[name].weight.shape[1] == norms[norm].weight.numel()
        )
        is_routed = any(".experts." in name for name in consumers)
        # A norm inside a low-rank projection has the parent of a module that it feeds.
        is_inner = any(name.rpartition(".")[0] == norm.rpartition(".")[0] for name in consumers)
        if consumers and not (norms_only and (is_routed or is_inner)):
            groups.append([Smoothing(smooth=norm, balance=consumers)])
    for first_leaf, second_leaf in () if norms_only else _PAIRS:
        pairs = []
        for first in calls:
            parent, _, leaf = first.rpartition(".")
            second = f"{parent}.{second_leaf}".lstrip(".")
            if leaf != first_leaf or second not in calls or not {first, second} <= matrices.keys():
                continue
            if matrices[first].weight.shape[0] == matrices[second].weight.shape[1]:
                pairs.append(Smoothing(smooth=first, balance=(second,)))
        groups.append(pairs)
    return groups, calls


def _consumers(
    norms: Mapping[str, Any], matrices: Mapping[str, Any], run: RunBatch
) -> tuple[dict[str, list[str]], dict[str, int]]:
    """Norm -> the matrices that read its output in a run, and the order in which modules are
    called.
    """
    produced: dict[int, str] = {}
    alive: list[Tensor] = []
    fed: dict[str, list[str]] = {name: [] for name in norms}
    calls: dict[str, int] = {}

    def after_norm(name: str, norm: Any, _args: object, output: object) -> None:
        calls.setdefault(name, len(calls))
        if isinstance(output, Tensor) and output.shape[-1] == norms[name].weight.numel():
            # The reference keeps the storage from being reused, so that its address stays this
            # norm's.
            alive.append(output)
            produced[output.untyped_storage().data_ptr()] = name

    def before_matrix(
        name: str, matrix: Any, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> None:
        calls.setdefault(name, len(calls))
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor) and value.shape[-1] == matrix.weight.shape[1]:
                source = produced.get(value.untyped_storage().data_ptr())
                if source is not None and name not in fed[source]:
                    fed[source].append(name)

    handles = [
        module.register_forward_hook(partial(after_norm, name)) for name, module in norms.items()
    ]
    for name, module in matrices.items():
        handles.append(
            module.register_forward_pre_hook(partial(before_matrix, name), with_kwargs=True)
        )
    with hooked(handles):
        run()
    return fed, calls


def _owners(model: Any, ndim: int) -> dict[str, Any]:
    """Modules that own a vector `weight` and nothing but a `bias` (norms), or a matrix (linear
    layers, routers).
    """
    found = {}
    for name, module in model.named_modules():
        weight = module._parameters.get("weight")
        if (
            weight is None
            or weight.ndim != ndim
            or weight.is_meta
            or isinstance(module, nn.Embedding)
        ):
            continue
        if ndim == 2 or {key for key, _ in module.named_parameters()} <= {"weight", "bias"}:
            found[name] = module
    return found


@contextmanager
def _powers_of_two(model: Any, smoothings: Sequence[Smoothing]) -> Iterator[None]:
    """Applies each smoothing with random powers of two, exactly, and puts the weights back
    afterwards.
    """
    saved: list[tuple[Tensor, Tensor]] = []
    generator = torch.Generator().manual_seed(0)
    try:
        for smoothing in smoothings:
            smooth = model.get_submodule(smoothing.smooth)
            balance = [model.get_submodule(name) for name in smoothing.balance]
            limit = _EXPONENTS.get(smooth.weight.dtype, _WIDE_EXPONENTS)
            exponents = torch.randint(
                -limit, limit + 1, (balance[0].weight.shape[1],), generator=generator
            )
            scale = torch.exp2(exponents.double()).to(smooth.weight.device)
            changes = [
                (smooth.weight, 1 / scale if smooth.weight.ndim == 1 else 1 / scale[:, None])
            ]
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
        if name not in smoothed and not all(
            torch.equal(a, b) for a, b in zip(tensors, after[name], strict=True)
        ):
            return name or "the model"
    return ""
