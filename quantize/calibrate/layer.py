"""Calibration of one layer by llm-compressor's modifiers: what the data says, and the weights it rewrites.

In: a model of which the modules named in `schemes` are real (a decoder layer among weightless stubs, or an MTP block),
and batches for its forward. Out: `Calibrated`: scales of activations, and the packed tensors of modules whose weights
the algorithm rewrote. This is the only module that drives llm-compressor.

The pipeline here is llm-compressor's own basic one (pipelines/basic/pipeline.py, 0.14.0.1) without `oneshot` around it:
`oneshot` re-reads config.json and refuses a source that is stored quantized, although what it is given is dequantized.

Easy to get wrong:
- a QuantizationModifier after a GPTQModifier in one recipe computes GPTQ's scales again, from the rewritten weights;
  before it, it does no harm (both act on every quantized module at the end of the pass);
- `norm_calibration_context` leaves zero-centred norms rounded to what 1 + weight can hold: they are put back;
- AWQ's grid search computes its reference at the end of the pass, when the basic pipeline has switched rounding on
  again: against scales that nobody has computed yet, no smoothing is ever better than none;
- everything runs under no_grad, never inference_mode (llm-compressor #2745).

Source: llm-compressor 0.14.0.1, compressed-tensors 0.19.0; equality with `oneshot(pipeline="sequential")` is tested in
tests/quantize/calibrate/test_layer.py.
"""

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.offload import as_single_threaded
from compressed_tensors.offload.dist_utils import as_broadcastable
from compressed_tensors.quantization import QuantizationScheme, QuantizationStatus, enable_quantization
from compressed_tensors.quantization.lifecycle.forward import forward_quantize
from compressed_tensors.utils import get_direct_state_dict, patch_attr
from llmcompressor.core import LifecycleCallbacks, active_session
from llmcompressor.modeling.moe.context import moe_calibration_context
from llmcompressor.modeling.moe.linear_experts import LinearExperts2D
from llmcompressor.modeling.moe.linearize import get_non_linearized_moes
from llmcompressor.modeling.offset_norm import norm_calibration_context
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.quantization.calibration import observe as observe_weights
from llmcompressor.modifiers.quantization.calibration import update_qparams
from llmcompressor.modifiers.transform.awq import AWQMapping, AWQModifier
from llmcompressor.modifiers.transform.awq.base import get_lowest_common_ancestor_with_avoid
from llmcompressor.modifiers.transform.awq.mappings import ResolvedMapping
from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier
from llmcompressor.observers.fusion import FusionHandler
from llmcompressor.pipelines.cache import IntermediatesCache
from llmcompressor.utils import calibration_forward_context
from llmcompressor.utils.helpers import DisableQuantization, disable_cache, disable_hf_kernels, eval_context
from loguru import logger as loguru_logger
from pydantic import PrivateAttr
from torch import Tensor, nn

from ...checkpoints import dequantize
from ...checkpoints.values import TORCH_DTYPES
from ...recipes.errors import CheckpointError, RecipeError
from ...recipes.schemes import RESCALING, REWRITES, SCHEMES
from ..pack import pack_alone
from .smoothing import Smoothing, check_preserved, find_smoothings, observe

# It logs by the line for every module; what matters of it is in `Calibrated`.
for _name in ("llmcompressor", "compressed_tensors"):
    loguru_logger.disable(_name)

Batch = Mapping[str, Tensor]
Batches = Iterable[Batch]

# Scales of modules that run fused, and how one is made of several: divisors shrink, multipliers grow.
_SHARED: Mapping[str, Callable[..., Tensor]] = {
    "weight_global_scale": torch.amin,
    "input_global_scale": torch.amin,
    "input_scale": torch.amax,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """What one quantized module saw.

    Attributes:
        tokens: rows of its input, over all batches and ranks.
        routed: for a routed expert, how many of them the router sent there; None for other modules.
    """

    module: str
    tokens: int
    routed: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """What calibration found out about one layer.

    Attributes:
        tensors: on the CPU, by "<module>.<suffix>" in the model's names: static input scales of modules that are
            rounded to nearest, all tensors of modules that the algorithm rewrote, and kept parameters that it rescaled.
        coverage: one entry for each quantized module.
        smoothings: what AWQ or SmoothQuant rescaled.
        left_out: a sentence for each smoothing that would have changed the layer's function.
        rounded: modules that GPTQ rounded to nearest because their Hessian could not be inverted.
    """

    tensors: Mapping[str, Tensor]
    coverage: tuple[Coverage, ...]
    smoothings: tuple[Smoothing, ...] = ()
    left_out: tuple[str, ...] = ()
    rounded: tuple[str, ...] = ()


def linear_experts(model: Any) -> None:
    """Replaces experts stored as 3-D stacks by one linear layer each, on the meta device, in place.

    Raises: CheckpointError where an expert module has a constructor of its own (Llama 4).
    """
    for name, module in get_non_linearized_moes(model):
        experts_class: Any = LinearExperts2D.get_linear_experts_cls(cast(Any, type(module)))
        if experts_class.__init__ is not LinearExperts2D.__init__:
            raise CheckpointError(
                name,
                "experts must have the common layout to be calibrated",
                got=type(module).__name__,
                cure="Use a data-free scheme for this model",
            )
        with torch.device("meta"):
            linear = experts_class(getattr(module, "config", model.config))
        for key, value in vars(module).items():  # what a family's gate reads of its experts (limits, slopes)
            if isinstance(value, int | float) and not hasattr(linear, key):
                setattr(linear, key, value)
        model.set_submodule(name, linear)


def calibrate(
    model: Any,
    batches: Batches,
    *,
    schemes: Mapping[str, str],
    algorithm: str,
    fused: Sequence[tuple[str, ...]] = (),
    frozen: Collection[str] = (),
    smoothings: Sequence[Smoothing] | None = None,
) -> Calibrated:
    """Runs the batches through the model and lets llm-compressor's modifiers observe, rescale and rewrite it.

    The model keeps its fake-quantized state: `propagating` and `serving` say which of the two is computed with.

    Args:
        model: experts as linear layers, on one device; only modules with weights are looked at.
        batches: keyword arguments of its forward, on its device, at least one for every rank. Iterated twice where
            the algorithm smooths (the first batch alone, then all).
        schemes: name of each module to be quantized -> name of its scheme.
        algorithm: minmax, gptq, awq or smoothquant; it rewrites the schemes of `REWRITES[algorithm]` only.
        fused: modules that run as one and need common global scales, those that llm-compressor fuses included.
        frozen: modules whose weights may not change, because their bytes come from the source.
        smoothings: None to have them found; a list is applied as it is, and checked afterwards only.

    Returns: tensors in the dtypes of `Scheme.tensors`.

    Raises:
        CheckpointError: naming the module that was never called, whose activations are not finite, or whose output
            AWQ or SmoothQuant changed.
        RecipeError: there is no batch.
    """
    rewritten = [name for name, scheme in schemes.items() if scheme in REWRITES[algorithm]]
    smooths = bool(rewritten) and algorithm in RESCALING
    before = _vectors(model)
    left_out: tuple[str, ...] = ()
    found = tuple(smoothings or ())
    watch = _Watch(model, schemes)
    with _session():
        run = _first_batch(model, batches)
        reference = {}
        if smooths:
            with _all_experts(model), DisableQuantization(model):
                reference = observe(model, run, rewritten)
                if smoothings is None:
                    with norm_calibration_context(model):
                        found, left_out = _agreed(
                            *find_smoothings(
                                model,
                                run,
                                rewritten=rewritten,
                                untouchable={*frozen, *(schemes.keys() - {*rewritten})},
                                norms_only=algorithm == "smoothquant",
                            )
                        )
            if algorithm == "awq":
                found, doubled = _one_a_parent(model, found)
                left_out += doubled
            _restore(model, before)
            for name in (name for smoothing in found for name in (smoothing.smooth, *smoothing.balance)):
                if name not in schemes:
                    module = model.get_submodule(name)
                    before |= {f"{name}.{key}": p.detach().clone() for key, p in module.named_parameters(recurse=False)}
        modifiers = _modifiers(schemes, rewritten, algorithm, found)
        with _all_experts(model), norm_calibration_context(model):
            _run_pipeline(model, batches, modifiers, watch, schemes, fused)
        moved = {f"{name}.weight" for smoothing in found for name in (smoothing.smooth, *smoothing.balance)}
        moved |= {f"{smoothing.smooth}.bias" for smoothing in found}
        _restore(model, {name: value for name, value in before.items() if name not in moved})
        if smooths:
            # With norms as the checkpoint holds them: a zero-centred one has lost bits to the subtraction of its 1.
            with _all_experts(model), DisableQuantization(model):
                weights = [model.get_submodule(name).weight for s in found for name in (s.smooth, *s.balance)]
                eps = max((torch.finfo(weight.dtype).eps for weight in weights), default=0.0)
                check_preserved(reference, observe(model, run, rewritten), found, eps=eps)

    now = dict(model.named_parameters())
    tensors = {
        name: now[name].detach().cpu().clone()
        for name, value in before.items()
        if name in moved and not torch.equal(now[name], value)
    }
    for name, scheme in schemes.items():
        tensors |= _tensors(name, model.get_submodule(name), scheme, whole=name in {*rewritten})
    check_fused(model, fused)
    rounded = tuple(name for modifier in modifiers if isinstance(modifier, _GPTQ) for name in modifier.fell_back)
    return Calibrated(tensors=tensors, coverage=watch.coverage(), smoothings=found, left_out=left_out, rounded=rounded)


@contextmanager
def propagating(model: Any) -> Iterator[None]:
    """Computes the layer's outputs as llm-compressor hands them on: rewritten weights, no rounding, eager attention.

    Every expert computes every token, so that sums are the same to the bit; the router still chooses whose output
    counts. Zero-centred norms are modules of another class meanwhile, with 1 + weight rounded: their hooks do not fire.
    """
    before = _vectors(model)
    try:
        with norm_calibration_context(model), _all_experts(model), DisableQuantization(model):
            yield
    finally:
        # 1 + weight in BF16 loses bits of a zero-centred weight, and taking the 1 away does not bring them back.
        _restore(model, before)


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


def check_fused(model: Any, fused: Iterable[tuple[str, ...]]) -> None:
    """Raises CheckpointError unless modules that run as one have equal global scales."""
    for group in fused:
        modules = [model.get_submodule(name) for name in group]
        for suffix in _SHARED:
            values = {float(value) for module in modules if isinstance(value := getattr(module, suffix, None), Tensor)}
            if len(values) > 1:
                raise CheckpointError(
                    ", ".join(group),
                    f"modules that run fused must share one {suffix}",
                    got=sorted(values),
                    cure="Give all of them one scheme",
                )


class _Cache(IntermediatesCache):
    """IntermediatesCache that works without an accelerator, where pinning memory is an error (0.14.0.1)."""

    def pin_memory(self, batch_index: int, input_names: list[str] | None = None) -> None:
        if torch.accelerator.is_available():
            super().pin_memory(batch_index, input_names)


class _AWQ(AWQModifier):
    """AWQModifier that runs on CPUs, too, where 0.14.0.1 sums over ranks on an accelerator that is not there."""

    def _setup_activation_cache_hooks(self) -> None:
        super()._setup_activation_cache_hooks()
        # The hooks look their cache up when they are called.
        device: Any = self.offload_device
        self._parent_args_cache = {module: _Cache(None, device) for module in self._parent_args_cache}

    def _compute_best_scale(self, mapping: ResolvedMapping, fp16_outputs: Any, orig_layer_weights: Any) -> Tensor:
        if not _sums_on_cpu():
            return super()._compute_best_scale(mapping, fp16_outputs, orig_layer_weights)
        for value in self._smooth_activation_stats[mapping.smooth_name]:
            dist.all_reduce(value)
        with as_single_threaded():
            return super()._compute_best_scale(mapping, fp16_outputs, orig_layer_weights)

    def _compute_loss(self, fp16_outputs: list[Tensor], int_w_outputs: list[Tensor]) -> float:
        loss = super()._compute_loss(fp16_outputs, int_w_outputs)
        if not _sums_on_cpu():
            return loss
        count = sum(output.numel() for output in fp16_outputs)
        totals = torch.tensor([loss * count, count], dtype=torch.float64)
        dist.all_reduce(totals)
        return (totals[0] / totals[1]).item()


def _has_others() -> bool:
    """Whether this process is one of several."""
    return dist.is_initialized() and dist.get_world_size() > 1


def _sums_on_cpu() -> bool:
    return _has_others() and not torch.accelerator.is_available()


class _GPTQ(GPTQModifier):
    """GPTQModifier that says what it did: which modules on this rank, and where the Hessian was of no use."""

    _own: list[str] = PrivateAttr(default_factory=list)
    _fell_back: list[str] = PrivateAttr(default_factory=list)

    @property
    def own(self) -> list[str]:
        return self._own

    @property
    def fell_back(self) -> list[str]:
        return self._fell_back

    def compress_module_list(self, module_list: list[nn.Module]) -> None:
        module_list = list(module_list)
        self._own += [self._module_names[module] for module in module_list]
        super().compress_module_list(module_list)
        self._fell_back += self._rtn_fallback_module_names


def _modifiers(
    schemes: Mapping[str, str], rewritten: Sequence[str], algorithm: str, smoothings: Sequence[Smoothing]
) -> list[Any]:
    """The recipe. Modules are named by one pattern each group: matching names one by one is quadratic in experts."""
    if algorithm == "gptq":
        rest = {name: scheme for name, scheme in schemes.items() if name not in {*rewritten}}
        own = {name: schemes[name] for name in rewritten}
        return [
            *([QuantizationModifier(config_groups=_config_groups(rest))] if rest else []),
            *([_GPTQ(config_groups=_config_groups(own))] if own else []),
        ]
    quantization = QuantizationModifier(config_groups=_config_groups(schemes))
    if not smoothings:
        return [quantization]
    if algorithm == "awq":
        mappings = [AWQMapping(_pattern((s.smooth,)), [_pattern(s.balance)]) for s in smoothings]
        return [_AWQ(mappings=mappings), quantization]
    return [
        SmoothQuantModifier(mappings=[([_pattern(s.balance)], _pattern((s.smooth,))) for s in smoothings]),
        quantization,
    ]


def _config_groups(schemes: Mapping[str, str]) -> dict[str, QuantizationScheme]:
    by_scheme: dict[str, list[str]] = {}
    for name, scheme in schemes.items():
        by_scheme.setdefault(scheme, []).append(name)
    return {
        scheme: QuantizationScheme(targets=[_pattern(names)], **SCHEMES[scheme].config_group())
        for scheme, names in by_scheme.items()
    }


def _pattern(names: Iterable[str]) -> str:
    return f"re:^(?:{'|'.join(re.escape(name) for name in names)})$"


def _run_pipeline(
    model: Any,
    batches: Batches,
    modifiers: list[Any],
    watch: "_Watch",
    schemes: Mapping[str, str],
    fused: Iterable[tuple[str, ...]],
) -> None:
    """llm-compressor's basic pipeline, with fused groups of the caller's and a look at every activation."""
    session = active_session()
    with _no_bars():
        session.initialize(model=model, start=-1, recipe=modifiers, calib_data=batches, copy_data=False)
        LifecycleCallbacks.calibration_start()
    for group in fused:
        modules = [model.get_submodule(name) for name in group if name in schemes]
        if modules and all(SCHEMES[schemes[name]].shares_global_scale for name in group if name in schemes):
            FusionHandler.fuse([(module.weight_observer, module) for module in modules])
    num_batches = 0
    with DisableQuantization(model):
        with watch:
            for num_batches, batch in enumerate(batches, start=1):
                session.state.current_batch_idx = num_batches - 1
                model(**batch)
                watch.check(num_batches)
        watch.finish(num_batches)
        with _no_bars():
            LifecycleCallbacks.sequential_epoch_end(list(model.modules()))
        _share(model, modifiers, schemes)
        _unify(model, fused)
    with _no_bars():
        LifecycleCallbacks.calibration_end()
        session.finalize()


def _share(model: Any, modifiers: Iterable[Any], schemes: Mapping[str, str]) -> None:
    """Gives every rank what the owners of modules computed; llm-compressor 0.14.0.1 does so on GPUs only.

    There, modules on the CPU are taken for offloaded ones in memory that the ranks share (utils/dist.py, skip_cpu).
    """
    if not _has_others():
        return
    owned: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(owned, [name for m in modifiers if isinstance(m, _GPTQ) for name in m.own])
    owner = {name: rank for rank, names in enumerate(owned) for name in names}
    rounded = [model.get_submodule(name) for name in schemes if name not in owner]
    observe_weights(rounded, "weight")
    update_qparams(rounded, "weight")
    for name in sorted(owner):
        for key, value in model.get_submodule(name).named_parameters(recurse=False):
            if key.startswith("weight"):
                dist.broadcast(as_broadcastable(value.data), src=owner[name])


def _unify(model: Any, fused: Iterable[tuple[str, ...]]) -> None:
    """One input scale for modules that run as one; their inputs are the same tensor, so mostly nothing changes."""
    for group in fused:
        modules = [model.get_submodule(name) for name in group]
        for suffix in ("input_global_scale", "input_scale"):
            scales = [s for module in modules if isinstance(s := getattr(module, suffix, None), Tensor)]
            if scales:
                common = _SHARED[suffix](torch.stack([scale.data for scale in scales]), dim=0)
                for scale in scales:
                    scale.data.copy_(common)


def _vectors(model: Any) -> dict[str, Tensor]:
    """Copies of the norms' weights and of all biases: what a context or a smoothing may change beside matrices."""
    return {
        name: value.detach().clone()
        for name, value in model.named_parameters()
        if value.ndim == 1 and not value.is_meta and name.rsplit(".", 1)[-1] in ("weight", "bias")
    }


def _restore(model: Any, values: Mapping[str, Tensor]) -> None:
    """Puts values back where they differ."""
    now = dict(model.named_parameters())
    for name, value in values.items():
        if not torch.equal(now[name], value):
            now[name].data.copy_(value)


def _tensors(name: str, module: Any, scheme: str, *, whole: bool) -> dict[str, Tensor]:
    """What a module adds to the statistics: all its packed tensors, or its input scales only."""
    state: Any = {key: value for key, value in get_direct_state_dict(module).items() if value is not None}
    if whole:
        compressor = BaseCompressor.get_value_from_registry(SCHEMES[scheme].format)
        state = compressor.compress(state, module.quantization_scheme)
    specs = SCHEMES[scheme].tensors(*module.weight.shape) if whole else SCHEMES[scheme].extra
    tensors = {}
    for spec in specs:
        value = state[spec.suffix]
        converted = value.to(TORCH_DTYPES[spec.dtype]).reshape(spec.shape)
        # An input scale is a choice and may be rounded; weights were rounded by these very scales.
        exact = torch.equal(converted.double(), value.reshape(spec.shape).double())
        if not exact and spec.suffix.startswith("weight"):
            raise CheckpointError(
                f"{name}.{spec.suffix}",
                f"a scale must be exact in {spec.dtype}",
                got=str(value.dtype),
                cure="Load the layer as BF16",
            )
        tensors[f"{name}.{spec.suffix}"] = converted.cpu().contiguous().clone()
    return tensors


@dataclass
class _Watch:
    """Counts the tokens of quantized modules and looks for values that are not finite, by hooks while it is entered."""

    model: Any
    schemes: Mapping[str, str]
    tokens: dict[str, int] = field(default_factory=dict)
    routed: dict[str, Any] = field(default_factory=dict)
    finite: list[tuple[str, str, Tensor]] = field(default_factory=list)
    handles: list = field(default_factory=list)

    def __enter__(self) -> None:
        for name in self.schemes:
            module = self.model.get_submodule(name)
            self.handles.append(module.register_forward_hook(self._seen(name), with_kwargs=True))
        for name, module in self.model.named_modules():
            if isinstance(module, LinearExperts2D):
                hook = self._sent(name, module.num_experts)
                self.handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def check(self, num_batches: int) -> None:
        """Raises CheckpointError naming the first module, in the order of calls, with a value that is not finite."""
        if not self.finite:
            return
        ok = torch.stack([flag for _, _, flag in self.finite]).tolist()
        for (name, side, _), good in zip(self.finite, ok, strict=True):
            if not good:
                raise CheckpointError(
                    name,
                    "activations must be finite during calibration",
                    got=f"NaN or infinity in its {side}, batch {num_batches}",
                    cure="Look for a broken weight in this layer, or calibrate in BF16 instead of F16",
                )
        self.finite.clear()

    def finish(self, num_batches: int) -> None:
        """Sums over the ranks; raises RecipeError without batches, CheckpointError for a module never called."""
        if not num_batches:
            raise _no_batch()
        if _has_others():
            counts: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(counts, (self.tokens, {name: value.cpu() for name, value in self.routed.items()}))
            self.tokens = {name: sum(tokens.get(name, 0) for tokens, _ in counts) for name in self.schemes}
            self.routed = {name: sum(routed[name] for _, routed in counts) for name in self.routed}
        silent = [name for name in self.schemes if not self.tokens.get(name)]
        if silent:
            raise CheckpointError(
                silent[0],
                "every quantized module must be called during calibration",
                got=f"{len(silent)} modules without a token",
                cure="Keep them in the recipe",
            )

    def coverage(self) -> tuple[Coverage, ...]:
        entries = []
        for name in self.schemes:
            routed = None
            for experts, counts in self.routed.items():
                index = name.removeprefix(f"{experts}.").split(".")[0]
                if name.startswith(f"{experts}.") and index.isdecimal():
                    routed = int(counts[int(index)])
            entries.append(Coverage(module=name, tokens=self.tokens[name], routed=routed))
        return tuple(entries)

    def _seen(self, name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, args: tuple, kwargs: dict, output: Tensor) -> None:
            value = args[0] if args else next(iter(kwargs.values()))
            self.tokens[name] = self.tokens.get(name, 0) + value.numel() // value.shape[-1]
            # The largest magnitude is NaN or infinite if any element is: one reduction, no mask.
            self.finite += [
                (name, side, v.abs().amax().isfinite())
                for side, v in (("input", value), ("output", output))
                if v.numel()
            ]

        return hook

    def _sent(self, name: str, num_experts: int) -> Callable[..., None]:
        def hook(_module: nn.Module, args: tuple, kwargs: dict) -> None:
            index = kwargs["top_k_index"] if "top_k_index" in kwargs else args[1]
            counts = torch.bincount(index.flatten(), minlength=num_experts)[:num_experts]
            self.routed[name] = self.routed[name] + counts if name in self.routed else counts

        return hook


@contextmanager
def _session() -> Iterator[None]:
    """A fresh session, and none afterwards: it holds the model and every modifier of the last one."""
    active_session().reset()
    try:
        yield
    finally:
        active_session().reset()


@contextmanager
def _all_experts(model: Any) -> Iterator[None]:
    """The forward of calibration: no_grad, eager attention, every expert on every token."""
    with moe_calibration_context(), calibration_forward_context(model):
        yield


@contextmanager
def _no_bars() -> Iterator[None]:
    """tqdm has no switch after its import, but writes to what sys.stderr is at that moment."""
    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stderr(nowhere):
        yield


def _first_batch(model: Any, batches: Batches) -> Callable[[], None]:
    def run() -> None:
        for batch in batches:
            model(**batch)
            return
        raise _no_batch()

    return run


def _no_batch() -> RecipeError:
    rule = "there must be a batch for every rank"
    return RecipeError("calibration", rule, got="none", cure="Raise calibration.samples")


def _one_a_parent(model: Any, found: Sequence[Smoothing]) -> tuple[tuple[Smoothing, ...], tuple[str, ...]]:
    """AWQ replays the module around what it balances, and keeps that module's arguments for one smoothing only.

    Source: llm-compressor 0.14.0.1 modifiers/transform/awq/base.py (`_parent_args_cache`), a KeyError otherwise.
    """
    kept: list[Smoothing] = []
    left_out: list[str] = []
    parents: set[str] = set()
    for smoothing in found:
        parent, _ = get_lowest_common_ancestor_with_avoid(iter(smoothing.balance), model)
        if parent in parents:
            left_out.append(f"{smoothing.smooth}: another smoothing is judged by {parent} already")
        else:
            parents.add(parent)
            kept.append(smoothing)
    return tuple(kept), tuple(left_out)


def _agreed(found: tuple[Smoothing, ...], left_out: tuple[str, ...]) -> tuple[tuple[Smoothing, ...], tuple[str, ...]]:
    """What all ranks found: each looked at a batch of its own."""
    if not _has_others():
        return found, left_out
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (found, left_out))
    return (
        tuple(smoothing for smoothing in everyone[0][0] if all(smoothing in theirs for theirs, _ in everyone)),
        tuple(dict.fromkeys(reason for _, reasons in everyone for reason in reasons)),
    )
