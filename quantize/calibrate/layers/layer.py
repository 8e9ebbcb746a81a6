"""Calibration of one layer by llm-compressor's modifiers: scales from the data, and the weights it rewrites.

In: a model of which the modules named in `schemes` are real (a decoder layer among weightless stubs, or an MTP block),
and batches for its forward. Out: `Calibrated`: scales of activations, and the packed tensors of modules whose weights
the algorithm rewrote. This module runs llm-compressor's session; `modifiers.py` builds what the session runs.

The pipeline here is llm-compressor's own basic one (pipelines/basic/pipeline.py, 0.14.0.1) without `oneshot` around it:
`oneshot` reads config.json again and refuses a source that is stored quantized, although the weights it gets are
dequantized.

Easy to get wrong: AWQ's grid search computes its reference at the end of the pass, when the basic pipeline has switched
rounding on again. Against scales that nobody has computed yet, no smoothing is ever better than none, so rounding stays
off until the modifiers are done.

Source: llm-compressor 0.14.0.1, compressed-tensors 0.19.0; equality with `oneshot(pipeline="sequential")` is tested in
tests/quantize/calibrate/test_layer.py.
"""

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.utils import get_direct_state_dict
from llmcompressor.core import LifecycleCallbacks, active_session
from llmcompressor.modeling.offset_norm import norm_calibration_context
from llmcompressor.modifiers.utils.hooks import HooksMixin
from llmcompressor.observers.fusion import FusionHandler
from llmcompressor.utils.helpers import DisableQuantization
from loguru import logger as loguru_logger
from torch import Tensor

from ....checkpoints.values import TORCH_DTYPES
from ....recipes.errors import CheckpointError
from ....recipes.schemes import RESCALING, REWRITES, SCHEMES, SWEEPS
from ...plan.tensor_plan import IMPORTANCE
from .caches import CacheRanges
from .coverage import Coverage, TokenCounter, find_not_finite, no_batch
from .expert_passes import ExpertPasses, StatisticsRoom
from .forwards import calibrating, plain_forwards, restore, small_parameters
from .modifiers import modifiers_for, one_a_parent, rounded_to_nearest, share
from .smoothing import Outputs, RunBatch, Smoothing, agreed, check_preserved, find_smoothings, observe

if TYPE_CHECKING:
    from .modelopt_backend import ModeloptBackend

# It logs by the line for every module; what matters of it is in `Calibrated`.
for _name in ("llmcompressor", "compressed_tensors"):
    loguru_logger.disable(_name)


Inputs = Iterable[Mapping[str, Tensor]]

# Scales of modules that run fused, and how one is made of several: divisors shrink, multipliers grow.
_SHARED: Mapping[str, Callable[..., Tensor]] = {
    "weight_global_scale": torch.amin,
    "input_global_scale": torch.amin,
    "input_scale": torch.amax,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """The results of one layer's calibration.

    Attributes:
        tensors: on the CPU, by "<module>.<suffix>" in the model's names: static input scales of modules that are
            rounded to nearest, the importance of the input channels of weighted ones, all tensors of modules that the
            algorithm rewrote, and kept parameters that it rescaled.
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


def calibrate(
    model: Any,
    batches: Inputs,
    *,
    schemes: Mapping[str, str],
    algorithm: str,
    fused: Sequence[tuple[str, ...]] = (),
    experts: Sequence[tuple[str, ...]] = (),
    frozen: Collection[str] = (),
    smoothings: Sequence[Smoothing] | None = None,
    after_batch: Callable[[], None] | None = None,
    routed: bool = False,
    knobs: Mapping[str, Any] | None = None,
    caches: Collection[str] = (),
    backend: str = "llmcompressor",
    weighted: Collection[str] = (),
) -> Calibrated:
    """Runs the batches through the model and lets llm-compressor's modifiers observe, rescale and rewrite it.

    The model keeps its fake-quantized state: `forwards.propagating` and `forwards.serving` say how it computes then.

    Args:
        model: experts as linear layers, on one device; modules without weights are ignored.
        batches: keyword arguments of its forward, on its device, at least one for every rank. Iterated twice where
            the algorithm smooths (the first batch alone, then all), and once more for each group of experts whose
            statistics do not fit the memory together with those of others.
        schemes: name of each module to be quantized -> name of its scheme.
        algorithm: of the recipe; it rewrites the schemes of `REWRITES[algorithm]` only.
        fused: modules that run as one and need common global scales, those that llm-compressor fuses included.
        experts: routed experts' modules that a server gives one input scale, the largest of theirs; without them, each
            has its own, as in llm-compressor.
        frozen: modules whose weights may not change, because their bytes come from the source.
        smoothings: None to have them found; a list is applied as it is, and checked afterwards only.
        after_batch: called after each batch of the pass that observes. Unless `rewrites(schemes, algorithm)`, what the
            layer has returned then is what it returns under `forwards.propagating`.
        routed: statistics of an expert are of the tokens that the router sends it; see `Calibration.experts`.
        knobs: of the algorithm; see `Calibration.knobs`.
        caches: attention modules whose keys and values get scales of an FP8 cache.
        backend: llmcompressor, or modelopt: its calibrators observe the inputs, and choose scales under its algorithms.
        weighted: modules whose importance of input channels the packer needs.

    Returns: tensors in the dtypes of `Scheme.tensors`.

    Raises:
        CheckpointError: naming the module that was never called, whose activations are not finite, or whose output
            AWQ or SmoothQuant changed.
        RecipeError: there is no batch.
    """
    ranges = CacheRanges(model, caches)
    if not schemes:
        with calibrating(model, routed=routed), norm_calibration_context(model), ranges.observing():
            _run_plainly(model, batches, after_batch)
        return Calibrated(tensors=ranges.scales(), coverage=())
    rewritten = _rewritten(schemes, algorithm)
    smooths = bool(rewritten) and algorithm in RESCALING
    before = small_parameters(model)
    counter = TokenCounter(model, schemes, routed=routed, weighted=weighted)
    first_batch = _first_batch(model, batches)
    found, left_out, reference = tuple(smoothings or ()), (), {}
    with _session():
        if smooths:
            untouchable = {*frozen, *(schemes.keys() - {*rewritten})}
            reference, candidates, left_out = _reference(
                model, first_batch, rewritten, untouchable, norms_only=algorithm == "smoothquant", given=smoothings
            )
            found, doubled = one_a_parent(model, candidates) if algorithm == "awq" else (candidates, ())
            left_out += doubled
            restore(model, before)
            before |= _plain_parameters(model, found, schemes)
        passes = ExpertPasses(model, batches, StatisticsRoom.of(_device(model, schemes)), routed=routed)
        modifiers = modifiers_for(schemes, rewritten, algorithm, found, passes, knobs)
        run_batches = partial(_run_batches, model, batches, counter, schemes, after_batch, ranges)
        own = _modelopt(model, schemes, algorithm) if backend == "modelopt" else None
        with calibrating(model, routed=routed), norm_calibration_context(model):
            observing = partial(own.observe, run_batches, batches) if own else run_batches
            _run_pipeline(model, batches, modifiers, observing, schemes, fused, experts, own)
        rescaled = _rescaled_names(found)
        restore(model, {name: value for name, value in before.items() if name not in rescaled})
        if smooths:
            _check_smoothed(model, first_batch, rewritten, found, reference)
        if any(smoothing.smooth.startswith(f"{name}.") for smoothing in found for name in caches):
            ranges = CacheRanges(model, caches)  # what attention hands to its cache is no longer what was seen
            with calibrating(model, routed=routed), DisableQuantization(model), ranges.observing():
                _run_plainly(model, batches, None)
    tensors = _changed(model, before, rescaled) | ranges.scales()
    tensors |= {f"{name}.{IMPORTANCE}": value for name, value in counter.importances().items()}
    for name, scheme in schemes.items():
        tensors |= _tensors(name, model.get_submodule(name), scheme, whole=name in {*rewritten})
    check_fused(model, fused)
    return Calibrated(
        tensors=tensors,
        coverage=counter.coverage(),
        smoothings=found,
        left_out=left_out,
        rounded=rounded_to_nearest(modifiers),
    )


def rewrites(schemes: Mapping[str, str], algorithm: str) -> bool:
    """Whether calibration changes weights of these modules; if not, the layer computes the same before and after.

    A sweep chooses scales, and rounds by them only what is written.
    """
    return algorithm not in SWEEPS and bool(_rewritten(schemes, algorithm))


def check_fused(model: Any, fused: Iterable[tuple[str, ...]]) -> None:
    """Raises CheckpointError unless modules that run as one have equal global scales."""
    for group in fused:
        modules = [model.get_submodule(name) for name in group]
        for suffix in _SHARED:
            values = {float(scale) for scale in _scales(modules, suffix)}
            if len(values) > 1:
                raise CheckpointError(
                    ", ".join(group),
                    f"modules that run fused must share one {suffix}",
                    got=sorted(values),
                    cure="Give all of them one scheme",
                )


def _rewritten(schemes: Mapping[str, str], algorithm: str) -> list[str]:
    """Modules whose weights the algorithm rewrites."""
    return [name for name, scheme in schemes.items() if scheme in REWRITES[algorithm]]


def _modelopt(model: Any, schemes: Mapping[str, str], algorithm: str) -> "ModeloptBackend":
    """modelopt takes seconds to import, and is not installed where no recipe asks for it."""
    from .modelopt_backend import ModeloptBackend

    return ModeloptBackend(model, schemes, algorithm)


# --- llm-compressor's pipeline ----------------------------------------------------------------------------------------


def _run_pipeline(
    model: Any,
    batches: Inputs,
    modifiers: list[Any],
    run_batches: Callable[[], None],
    schemes: Mapping[str, str],
    fused: Iterable[tuple[str, ...]],
    experts: Iterable[tuple[str, ...]],
    own: "ModeloptBackend | None",
) -> None:
    """llm-compressor's basic pipeline, with the caller's fused groups, and the scales of another back-end."""
    session = active_session()
    with _no_bars():
        session.initialize(model=model, start=-1, recipe=modifiers, calib_data=batches, copy_data=False)
        LifecycleCallbacks.calibration_start()
    for group in fused:
        _fuse_observers(model, [name for name in group if name in schemes], schemes)
    with DisableQuantization(model):
        run_batches()
        with _no_bars():
            LifecycleCallbacks.sequential_epoch_end(list(model.modules()))
        share(model, modifiers, schemes)
        if own:
            own.set_weight_scales(tuple(fused))
        _unify(model, (*fused, *experts))
    with _no_bars():
        LifecycleCallbacks.calibration_end()
        session.finalize()


def _run_batches(
    model: Any,
    batches: Inputs,
    counter: TokenCounter,
    modules: Collection[str],
    after_batch: Callable[[], None] | None,
    ranges: CacheRanges,
) -> None:
    """All batches through the model, and a check of every activation."""
    num_batches = 0
    with counter, plain_forwards(model), ranges.observing():
        for num_batches, batch in enumerate(batches, start=1):
            active_session().state.current_batch_idx = num_batches - 1
            model(**batch)
            counter.ranges.end_batch()
            if after_batch is not None:
                after_batch()
    counter.finish(num_batches)
    if not counter.is_finite():
        with HooksMixin.disable_hooks():
            find_not_finite(model, modules, batches)
    counter.fill_observers()


def _run_plainly(model: Any, batches: Inputs, after_batch: Callable[[], None] | None) -> None:
    """All batches through a model in which nothing but caches is quantized."""
    is_empty = True
    for batch in batches:
        is_empty = False
        model(**batch)
        if after_batch is not None:
            after_batch()
    if is_empty:
        raise no_batch()


def _fuse_observers(model: Any, names: Sequence[str], schemes: Mapping[str, str]) -> None:
    """Lets the observers of modules that run as one compute one global scale."""
    if names and all(SCHEMES[schemes[name]].shares_global_scale for name in names):
        modules = [model.get_submodule(name) for name in names]
        FusionHandler.fuse([(module.weight_observer, module) for module in modules])


def _unify(model: Any, fused: Iterable[tuple[str, ...]]) -> None:
    """One input scale for modules that run as one; the inputs of fused ones are the same, those of experts differ."""
    for group in fused:
        modules = [model.get_submodule(name) for name in group]
        for suffix in ("input_global_scale", "input_scale"):
            scales = _scales(modules, suffix)
            if scales:
                common = _SHARED[suffix](torch.stack([scale.data for scale in scales]), dim=0)
                for scale in scales:
                    scale.data.copy_(common)


def _scales(modules: Iterable[Any], suffix: str) -> list[Tensor]:
    """The scales called `suffix` of those modules that have one."""
    found = [getattr(module, suffix, None) for module in modules]
    return [scale for scale in found if isinstance(scale, Tensor)]


@contextmanager
def _session() -> Iterator[None]:
    """A fresh session, and none afterwards: it holds the model and every modifier of the last one."""
    active_session().reset()
    try:
        yield
    finally:
        active_session().reset()


@contextmanager
def _no_bars() -> Iterator[None]:
    """tqdm has no switch after its import, but writes to what sys.stderr is at that moment."""
    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stderr(nowhere):
        yield


def _device(model: Any, schemes: Iterable[str]) -> torch.device:
    """Where the weights are."""
    return next((model.get_submodule(name).weight.device for name in schemes), torch.device("cpu"))


def _first_batch(model: Any, batches: Inputs) -> RunBatch:
    def run() -> None:
        for batch in batches:
            model(**batch)
            return
        raise no_batch()

    return run


# --- smoothing: what AWQ and SmoothQuant rescale ----------------------------------------------------------------------


def _reference(
    model: Any,
    run: RunBatch,
    rewritten: Sequence[str],
    untouchable: Collection[str],
    *,
    norms_only: bool,
    given: Sequence[Smoothing] | None,
) -> tuple[Outputs, tuple[Smoothing, ...], tuple[str, ...]]:
    """What the layer computes before it is rescaled, the smoothings to apply, and a sentence for each one left out."""
    with calibrating(model), DisableQuantization(model):
        reference = observe(model, run, rewritten)
        if given is not None:
            return reference, tuple(given), ()
        with norm_calibration_context(model):
            found, left_out = find_smoothings(
                model, run, rewritten=rewritten, untouchable=untouchable, norms_only=norms_only
            )
            return reference, *agreed(found, left_out)


def _check_smoothed(
    model: Any, run: RunBatch, rewritten: Sequence[str], found: Sequence[Smoothing], reference: Outputs
) -> None:
    """Refuses a layer that computes something else than before.

    The norms are those of the checkpoint again: while a zero-centred one was replaced, it lost bits to the subtraction
    of its 1.
    """
    with calibrating(model), DisableQuantization(model):
        weights = [model.get_submodule(name).weight for name in _touched(found)]
        eps = max((torch.finfo(weight.dtype).eps for weight in weights), default=0.0)
        check_preserved(reference, observe(model, run, rewritten), found, eps=eps)


def _touched(smoothings: Iterable[Smoothing]) -> list[str]:
    """Modules whose weights the smoothings rescale."""
    return [name for smoothing in smoothings for name in (smoothing.smooth, *smoothing.balance)]


def _rescaled_names(smoothings: Iterable[Smoothing]) -> set[str]:
    """Parameters that the smoothings rescale."""
    weights = {f"{name}.weight" for name in _touched(smoothings)}
    return weights | {f"{smoothing.smooth}.bias" for smoothing in smoothings}


def _plain_parameters(model: Any, smoothings: Iterable[Smoothing], schemes: Mapping[str, str]) -> dict[str, Tensor]:
    """Copies of what the smoothings may change in modules that are not quantized."""
    found = {}
    for name in _touched(smoothings):
        if name not in schemes:
            own = model.get_submodule(name).named_parameters(recurse=False)
            found |= {f"{name}.{key}": value.detach().clone() for key, value in own}
    return found


# --- tensors for the statistics ---------------------------------------------------------------------------------------


def _changed(model: Any, before: Mapping[str, Tensor], rescaled: Collection[str]) -> dict[str, Tensor]:
    """Kept parameters that a smoothing rescaled."""
    now = dict(model.named_parameters())
    changed = [name for name, value in before.items() if name in rescaled and not torch.equal(now[name], value)]
    return {name: now[name].detach().cpu().clone() for name in changed}


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
