"""Calibration of one layer by llm-compressor's modifiers: scales from the data, and the weights it
rewrites.

In: a model of which the modules of a `LayerWork` are real (a decoder layer among weightless stubs,
or an MTP block), and batches for its forward. Out: `Calibrated`: scales of activations, and the
packed tensors of modules whose weights the algorithm rewrote. This module runs llm-compressor's
session; `modifiers.py` builds what the session runs.

The pipeline here is llm-compressor's own basic one (pipelines/basic/pipeline.py, 0.14.0.1) without
`oneshot` around it: `oneshot` reads config.json again and refuses a source that is stored
quantized, although the weights it gets are dequantized.

Easy to get wrong: AWQ's grid search computes its reference at the end of the pass, when the basic
pipeline has switched rounding on again. Against scales that nobody has computed yet, no smoothing
is ever better than none, so rounding stays off until the modifiers are done.

Source: llm-compressor 0.14.0.1, compressed-tensors 0.19.0; equality with
`oneshot(pipeline="sequential")` is tested in tests/quantize/calibrate/test_layer.py.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.utils import get_direct_state_dict
from llmcompressor.core import LifecycleCallbacks, create_session
from llmcompressor.core.session import CompressionSession
from llmcompressor.modeling.offset_norm import norm_calibration_context
from llmcompressor.modifiers.utils.hooks import HooksMixin
from llmcompressor.observers.fusion import FusionHandler
from llmcompressor.utils.helpers import DisableQuantization
from loguru import logger as loguru_logger
from torch import Tensor

from ....checkpoints.values import TORCH_DTYPES
from ....recipes.schemes import RESCALING, SCHEMES
from ...plan.tensor_plan import IMPORTANCE
from .caches import CacheRanges
from .coverage import Coverage, TokenCounter, find_not_finite, no_batch
from .expert_passes import ExpertPasses, host_room
from .forwards import calibrating, plain_forwards, restore, small_parameters
from .modifiers import modifiers_for, rounded_to_nearest, share
from .smoothing import Smoothing, smoothings_of
from .work import LayerWork

# It logs by the line for every module; what matters of it is in `Calibrated`.
for _name in ("llmcompressor", "compressed_tensors"):
    loguru_logger.disable(_name)


Inputs = Iterable[Mapping[str, Tensor]]

# Scales of modules that run fused, and how one is made of several: divisors shrink, multipliers
# grow.
_SHARED: Mapping[str, Callable[..., Tensor]] = {
    "weight_global_scale": torch.amin,
    "input_global_scale": torch.amin,
    "input_scale": torch.amax,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """The results of one layer's calibration.

    Attributes:
        tensors: on the CPU, by "<module>.<suffix>" in the model's names: static input scales of
            modules that are rounded to nearest, the importance of the input channels of weighted
            ones, all tensors of modules that the algorithm rewrote, and kept parameters that it
            rescaled.
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
    model: Any, batches: Inputs, work: LayerWork, *, after_batch: Callable[[], None] | None = None
) -> Calibrated:
    """Runs the batches through the model and lets llm-compressor's modifiers observe, rescale and
    rewrite it.

    The model keeps its fake-quantized state: `forwards.propagating` and `forwards.serving` say how
    it computes then.

    Args:
        model: experts as linear layers, on one device; modules without weights are ignored.
        batches: keyword arguments of its forward, on its device, at least one for every rank.
            Iterated twice where the algorithm smooths (the first batch alone, then all), and once
            more for each group of experts whose statistics do not fit the memory together with
            those of others.
        work: on the layer or block.
        after_batch: called after each batch of the pass that observes. Unless `work.rewrites`, what
            the layer has returned then is what it returns under `forwards.propagating`.

    Returns: tensors in the dtypes of `Scheme.tensors`.

    Raises:
        CheckpointError: naming the module that was never called, or whose activations are not
            finite.
        RecipeError: there is no batch.
    """
    ranges = CacheRanges(model, work.scaled_caches)
    if not work.schemes:
        with (
            calibrating(model, routed=work.routed),
            norm_calibration_context(model),
            ranges.observing(),
        ):
            if not _run_all(model, batches, after_batch):
                raise no_batch()
        return Calibrated(tensors=ranges.scales(), coverage=())
    before, smoothings, left_out = small_parameters(model), (), ()

    def first_batch() -> None:
        if not _run_all(model, islice(batches, 1), None):
            raise no_batch()

    counter = TokenCounter(model, work)
    with create_session() as session:
        if work.rewritten and work.algorithm in RESCALING:
            smoothings, left_out = smoothings_of(model, first_batch, work)
        touched = {name for smoothing in smoothings for name in smoothing.touched}
        for name in touched - work.schemes.keys():
            own = model.get_submodule(name).named_parameters(name, recurse=False)
            before |= {key: value.detach().clone() for key, value in own}
        rescaled = {key: before.pop(key) for key in [*before] if key.rpartition(".")[0] in touched}
        passes = ExpertPasses(model, batches, host_room(), routed=work.routed)
        modifiers = modifiers_for(work, smoothings, passes)
        run = partial(_run_counted, session, model, batches, counter, ranges, after_batch)
        with calibrating(model, routed=work.routed), norm_calibration_context(model):
            _run_pipeline(session, model, work, modifiers, batches, run)
        restore(model, before)
        if (
            smoothings and work.scaled_caches
        ):  # attention hands its cache something else than was seen
            ranges = CacheRanges(model, work.scaled_caches)
            with (
                calibrating(model, routed=work.routed),
                DisableQuantization(model),
                ranges.observing(),
            ):
                _run_all(model, batches, None)
    return Calibrated(
        tensors=_tensors(model, work, rescaled)
        | ranges.scales()
        | {f"{name}.{IMPORTANCE}": value for name, value in counter.importances().items()},
        coverage=counter.coverage(),
        smoothings=smoothings,
        left_out=left_out,
        rounded=rounded_to_nearest(modifiers),
    )


# --- llm-compressor's pipeline
# ----------------------------------------------------------------------------------------


def _run_pipeline(
    session: CompressionSession,
    model: Any,
    work: LayerWork,
    modifiers: list[Any],
    batches: Inputs,
    run: Callable[[], None],
) -> None:
    """llm-compressor's basic pipeline, with the plan's fused groups, and the scales of another
    back-end.
    """
    own = None
    if (
        work.backend == "modelopt"
    ):  # it takes seconds to import, and is not installed where no recipe asks for it
        from .modelopt_backend import ModeloptBackend

        own = ModeloptBackend(model, work)
    with _no_bars():
        session.initialize(
            model=model, start=-1, recipe=modifiers, calib_data=batches, copy_data=False
        )
        LifecycleCallbacks.calibration_start()
    for group in work.fused:  # their observers compute one global scale
        names = [name for name in group if name in work.schemes]
        if names and all(SCHEMES[work.schemes[name]].shares_global_scale for name in names):
            modules = [model.get_submodule(name) for name in names]
            FusionHandler.fuse([(module.weight_observer, module) for module in modules])
    with DisableQuantization(model):
        if own:
            own.observe(run, batches)
        else:
            run()
        with _no_bars():
            LifecycleCallbacks.sequential_epoch_end(list(model.modules()))
        share(model, modifiers, work.schemes)
        if own:
            own.set_weight_scales(tuple(work.fused))
        # One input scale for modules that run as one: the inputs of fused ones are the same, those
        # of experts differ.
        for group in (*work.fused, *work.experts):
            for suffix in ("input_global_scale", "input_scale"):
                scales = _scales(model, group, suffix)
                if scales:
                    common = _SHARED[suffix](torch.stack([scale.data for scale in scales]), dim=0)
                    for scale in scales:
                        scale.data.copy_(common)
    with _no_bars():
        LifecycleCallbacks.calibration_end()
        session.finalize()


def _run_counted(
    session: CompressionSession,
    model: Any,
    batches: Inputs,
    counter: TokenCounter,
    ranges: CacheRanges,
    after_batch: Callable[[], None] | None,
) -> None:
    """All batches through the model, and a check of every activation."""

    def end_batch() -> None:
        session.state.current_batch_idx += 1
        counter.ranges.end_batch()
        if after_batch is not None:
            after_batch()

    session.state.current_batch_idx = 0
    with counter.counting(), plain_forwards(model), ranges.observing():
        num_batches = _run_all(model, batches, end_batch)
    counter.finish(num_batches)
    if not counter.ranges.are_finite():
        with HooksMixin.disable_hooks():
            find_not_finite(model, counter.modules, batches)
    counter.fill_observers()


def _run_all(model: Any, batches: Inputs, after_batch: Callable[[], None] | None) -> int:
    """Returns the number of batches."""
    num_batches = 0
    for batch in batches:
        num_batches += 1
        model(**batch)
        if after_batch is not None:
            after_batch()
    return num_batches


@contextmanager
def _no_bars() -> Iterator[None]:
    """tqdm has no switch after its import, but writes to what sys.stderr is at that moment."""
    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stderr(nowhere):
        yield


# --- tensors for the statistics
# ---------------------------------------------------------------------------------------


def _scales(model: Any, names: Iterable[str], suffix: str) -> list[Tensor]:
    """The scales called `suffix` of those modules that have one."""
    found = [getattr(model.get_submodule(name), suffix, None) for name in names]
    return [scale for scale in found if isinstance(scale, Tensor)]


def _tensors(model: Any, work: LayerWork, kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those of `kept` parameters that have changed; what the modules add: packed tensors, or input
    scales only.
    """
    now, found = dict(model.named_parameters()), {}
    for name, value in kept.items():
        if not torch.equal(now[name], value):
            found[name] = now[name].detach().cpu().clone()
    rewritten = {*work.rewritten}
    for name, scheme_name in work.schemes.items():
        module, scheme = model.get_submodule(name), SCHEMES[scheme_name]
        state: Any = {
            key: value for key, value in get_direct_state_dict(module).items() if value is not None
        }
        specs = scheme.extra
        if name in rewritten:
            specs = scheme.tensors(*module.weight.shape)
            compressor = BaseCompressor.get_value_from_registry(scheme.format)
            state = compressor.compress(state, module.quantization_scheme)
        for spec in specs:
            value = state[spec.suffix].to(TORCH_DTYPES[spec.dtype]).reshape(spec.shape)
            found[f"{name}.{spec.suffix}"] = value.cpu().contiguous().clone()
    return found
