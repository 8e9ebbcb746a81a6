"""llm-compressor's modifiers for a recipe: quantization, GPTQ, AWQ, SmoothQuant, AutoRound.

In: schemes by module, an algorithm, and the smoothings that were found. Out: the modifiers in the
order they act, and `share`, which gives every rank the weights that another rank computed.

Easy to get wrong: a QuantizationModifier after a GPTQModifier in one recipe computes GPTQ's scales
again, from the rewritten weights. Before it, it does no harm: both act on every quantized module at
the end of the pass.

Source: llm-compressor 0.14.0.1, compressed-tensors 0.19.0.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch.distributed as dist
from compressed_tensors.distributed import greedy_bin_packing
from compressed_tensors.offload.dist_utils import as_broadcastable
from compressed_tensors.quantization import QuantizationScheme
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.gptq.base import _GPTQ_Q_PARAMS
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.quantization.calibration import observe as observe_weights
from llmcompressor.modifiers.quantization.calibration import update_qparams
from llmcompressor.modifiers.transform.awq import AWQMapping
from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier
from llmcompressor.utils.dist import broadcast_qparams_and_cleanup
from pydantic import PrivateAttr
from torch import Tensor, nn

from ....recipes.schemes import SCHEMES
from ...run.ranks import gathered, has_others
from .awq import BoundedAWQ
from .expert_passes import ExpertPasses
from .hessians import Hessians, factored_once
from .smoothing import Smoothing
from .work import LayerWork


def modifiers_for(
    work: LayerWork, smoothings: Sequence[Smoothing], passes: ExpertPasses
) -> list[Any]:
    """The modifiers of one layer, in the order they act.

    Args:
        work: on the layer.
        smoothings: what awq or smoothquant rescales; without any, modules are rounded to nearest.
        passes: for what does not fit the memory for all experts at once.
    """
    own: dict[str, str] = {}
    modifiers: list[Any] = []
    if work.algorithm == "awq" and smoothings:
        mappings = [AWQMapping(_pattern((s.smooth,)), [_pattern(s.balance)]) for s in smoothings]
        modifiers = [BoundedAWQ(mappings=mappings, **work.knobs).with_passes(passes)]
    elif work.algorithm == "smoothquant" and smoothings:
        pairs: list[Any] = [([_pattern(s.balance)], _pattern((s.smooth,))) for s in smoothings]
        modifiers = [SmoothQuantModifier(mappings=pairs)]
    elif work.algorithm == "gptq" and work.rewritten:
        own = {name: work.schemes[name] for name in work.rewritten}
        modifiers = [_GPTQ(config_groups=_config_groups(own), **work.knobs).with_passes(passes)]
    elif work.algorithm == "autoround" and work.rewritten:
        from .autoround import LayerAutoRound, tuned_layers  # auto-round is a package of its own

        # What is within a decoder layer; all else is rounded to nearest.
        layers = tuned_layers(passes.model, work.rewritten)
        own = {name: work.schemes[name] for names in layers.values() for name in names}
        if own:
            learned = LayerAutoRound(config_groups=_config_groups(own), **work.knobs)
            modifiers = [learned.within(passes.model, layers)]
    rest = {name: scheme for name, scheme in work.schemes.items() if name not in own}
    if not rest:
        return modifiers
    rounding = _Quantization(config_groups=_config_groups(rest))
    return [rounding, *modifiers] if own else [*modifiers, rounding]


def rounded_to_nearest(modifiers: Iterable[Any]) -> tuple[str, ...]:
    """Modules that GPTQ rounded to nearest because their Hessian could not be inverted, on
    whichever rank.
    """
    own = [
        name for modifier in modifiers if isinstance(modifier, _GPTQ) for name in modifier.fell_back
    ]
    return tuple(name for names in gathered(own) for name in names)


def share(model: Any, modifiers: Iterable[Any], schemes: Mapping[str, str]) -> None:
    """Gives every rank what the owners of modules computed; llm-compressor 0.14.0.1 does so on GPUs
    only.

    It takes modules on the CPU for offloaded ones in memory that the ranks share (utils/dist.py,
    skip_cpu).
    """
    if not has_others():
        return
    owned = gathered(
        [name for modifier in modifiers if isinstance(modifier, _GPTQ) for name in modifier.own]
    )
    owner = {name: rank for rank, names in enumerate(owned) for name in names}
    rounded = [model.get_submodule(name) for name in schemes if name not in owner]
    observe_weights(rounded, "weight")
    update_qparams(rounded, "weight")
    for name in sorted(owner):
        for key, value in model.get_submodule(name).named_parameters(recurse=False):
            if key.startswith("weight"):
                dist.broadcast(as_broadcastable(value.data), src=owner[name])


class _Quantization(QuantizationModifier):
    """QuantizationModifier whose observers are filled by `coverage.TokenCounter`."""

    def _initialize_hooks(self, module: nn.Module) -> set[Any]:
        return set()


class _GPTQ(GPTQModifier):
    """GPTQModifier with one Hessian for each distinct input.

    Modules are rewritten one at a time: in batches, as 0.14.0.1 does on GPUs, the bits depend on
    the free memory. The observers of inputs are filled by `coverage.TokenCounter`.
    """

    batched_quantization: Literal["auto"] | int | None = None
    _own: list[str] = PrivateAttr(default_factory=list)
    _fell_back: list[str] = PrivateAttr(default_factory=list)
    _sums: Hessians = PrivateAttr()
    _passes: ExpertPasses = PrivateAttr()

    @property
    def own(self) -> list[str]:
        """Modules that were rewritten on this rank."""
        return self._own

    @property
    def fell_back(self) -> list[str]:
        """Those of them whose Hessian could not be inverted."""
        return self._fell_back

    def with_passes(self, passes: ExpertPasses) -> "_GPTQ":
        """An expert that the router sent no token is rewritten from all of them, in a further
        pass.
        """
        self._passes = passes
        return self

    def on_initialize(self, state: Any, **kwargs: Any) -> bool:
        is_done = super().on_initialize(state, **kwargs)
        self._sums = Hessians(self._module_names)
        return is_done

    def _initialize_hooks(self, module: nn.Module) -> set[Any]:
        return set()

    def calibrate_module(
        self, module: nn.Module, args: tuple[Tensor, ...], _output: Tensor
    ) -> None:
        self._sums.add(module, args[0])

    def compress_modules(self) -> None:
        if uncalled := self._sums.uncalled():
            self._passes.run({self._passes.expert_of[module] for module in uncalled})
            self._sums.uncalled()
        self._compress([*self._module_names])
        self._fell_back += (
            self._rtn_fallback_module_names
        )  # the library's own list ends with the session

    def _compress(self, modules: Sequence[nn.Module]) -> None:
        """Of these modules those that were called, by the ranks together, with the Hessians of all
        ranks.
        """
        if not has_others():
            self.compress_module_list([module for module in modules if module in self._sums])
            return
        self._sums.sum_over_ranks(modules)
        modules, of_ranks, rank_of = greedy_bin_packing(
            [module for module in modules if module in self._sums],
            dist.get_world_size(),
            item_weight_fn=lambda module: self._sums.matrix(module).shape[0],
        )
        self.compress_module_list(of_ranks[dist.get_rank()])
        self._sums.drop([module for module in modules if module in self._sums])
        broadcast_qparams_and_cleanup(modules, rank_of, _GPTQ_Q_PARAMS)

    def compress_module_list(self, module_list: list[nn.Module]) -> None:
        for modules in self._sums.groups(module_list):
            self._own += [self._module_names[module] for module in modules]
            self._hessians = {module: self._sums.matrix(module) for module in modules}
            self._num_samples = {module: self._sums.samples(module) for module in modules}
            with factored_once():
                super().compress_module_list(modules)
            self._sums.drop(modules)


def _config_groups(schemes: Mapping[str, str]) -> dict[str, QuantizationScheme]:
    by_scheme: dict[str, list[str]] = defaultdict(list)
    for name, scheme in schemes.items():
        by_scheme[scheme].append(name)
    return {
        scheme: QuantizationScheme(targets=[_pattern(names)], **SCHEMES[scheme].config_group())
        for scheme, names in by_scheme.items()
    }


def _pattern(names: Iterable[str]) -> str:
    """One pattern for a group of modules: to match names one by one is quadratic in the experts."""
    return f"re:^(?:{'|'.join(re.escape(name) for name in names)})$"
