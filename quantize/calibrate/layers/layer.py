"""Calibration of one layer: scales from the data, and the weights that an algorithm rewrites.

In: a model of which the modules of a `LayerWork` are real (a decoder layer among weightless stubs,
or an MTP block), and batches for its forward. Out: `Calibrated`: scales of activations, and the
packed tensors of modules whose weights the algorithm rewrote.

The order is that of llm-compressor's own basic pipeline (pipelines/basic/pipeline.py, 0.14.0.1),
without its session: `oneshot` reads config.json again and refuses a source that is stored
quantized, although the weights it gets are dequantized. An algorithm is a context around the pass
over the batches: it looks on while the pass runs, and rewrites at its end.

Easy to get wrong: nothing may be rounded while an algorithm works. AWQ's grid search computes its
reference at the end of the pass; against scales that nobody has computed yet, no smoothing is ever
better than none.

Source: llm-compressor 0.14.0.1, compressed-tensors 0.19.0; equality with
`oneshot(pipeline="sequential")` is tested in tests/quantize/calibrate/layers/test_layer.py.
"""

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.utils import get_direct_state_dict
from llmcompressor.modeling.offset_norm import norm_calibration_context
from llmcompressor.modifiers.quantization.calibration import freeze_module_quantization
from loguru import logger as loguru_logger
from torch import Tensor

from ....checkpoints.values import TORCH_DTYPES
from ....recipes.frozen import frozen, without_none
from ....recipes.schemes import RESCALING, SCHEMES, SWEEPS
from .awq import rescaling
from .caches import CacheRanges
from .forwards import calibrating, restore, small_parameters
from .gptq import gptq
from .observed import Observed
from .smoothing import Smoothing, smoothings_of
from .work import LayerWork, attach

# It logs by the line for every module; what matters of it is in `Calibrated`.
for _name in ("llmcompressor", "compressed_tensors"):
    loguru_logger.disable(_name)


@frozen
class Calibrated:
    """The results of one layer's calibration.

    Attributes:
        tensors: on the CPU, by "<module>.<suffix>" in the model's names: static input scales of
            modules that are rounded to nearest, all tensors of modules that the algorithm rewrote,
            and kept parameters that it rescaled.
        coverage: quantized module -> its tokens; of routed experts, those that the router sent.
        smoothings: what AWQ or SmoothQuant rescaled.
    """

    tensors: Mapping[str, Tensor]
    coverage: Mapping[str, int]
    smoothings: tuple[Smoothing, ...] = ()


def calibrate(model: Any, batches: Iterable[Mapping[str, Tensor]], work: LayerWork) -> Calibrated:
    """Run the batches through the model, and let the algorithm observe, rescale and rewrite it.

    `forwards.calibrating` and `forwards.serving` say how the model computes afterwards.

    Args:
        model: experts as linear layers, on one device; modules without weights are ignored.
        batches: keyword arguments of its forward, on its device, at least one for every rank.
            Iterated twice where the algorithm smooths (the first batch alone, then all), once more
            where inputs or the cache have static scales then, and once more for each group of
            experts whose statistics need a pass of their own. Unless `work.rewrites`, what the
            layer returns in the pass that observes is what it returns afterwards.
        work: on the layer or block.

    Returns: tensors in the dtypes of `Scheme.tensors`.

    Raises:
        CheckpointError: naming the module that was never called, or whose activations are not
            finite.
    """
    before = small_parameters(model)
    rescaled = {}
    smoothings: tuple[Smoothing, ...] = ()
    if work.rewritten and work.algorithm in RESCALING:
        smoothings = smoothings_of(model, batches, work)
    for name in {name for smoothing in smoothings for name in smoothing.touched}:
        for key, value in model.get_submodule(name).named_parameters(name, recurse=False):
            before.pop(key, None)
            if key != f"{name}.weight" or name not in work.schemes:
                rescaled[key] = value.detach().clone()
    attach(model, work)
    # llm-compressor rounds zero-centred norms to what 1 + weight can hold, for any algorithm. No
    # server does, so here it is only where a norm's weight is rescaled.
    norms = norm_calibration_context(model) if smoothings else nullcontext()
    with calibrating(model), norms, _algorithm(model, work, smoothings, batches):
        observed, caches = _observe(model, work, batches)
    restore(model, before)
    if smoothings and (work.scaled_caches or any(SCHEMES[s].extra for s in work.schemes.values())):
        # Modules are handed something else than was seen, and so is the cache.
        with calibrating(model):
            observed, caches = _observe(model, work, batches)
    observed.set_input_scales()
    tensors = _tensors(model, work, rescaled) | caches.scales()
    return Calibrated(tensors=tensors, coverage=observed.coverage(), smoothings=smoothings)


def _observe(
    model: Any, work: LayerWork, batches: Iterable[Mapping[str, Tensor]]
) -> tuple[Observed, CacheRanges]:
    """A pass over the batches, and what it has seen."""
    observed = Observed(model, work)
    caches = CacheRanges(model, work.scaled_caches)
    with observed.watching(), caches.observing():
        for batch in batches:
            observed.end_batch(model(**batch))
        observed.finish()
    return observed, caches


def _algorithm(
    model: Any,
    work: LayerWork,
    smoothings: tuple[Smoothing, ...],
    batches: Iterable[Mapping[str, Tensor]],
) -> AbstractContextManager[None]:
    """The algorithm's context around the pass; a package is imported where a recipe asks for it."""
    if not work.rewritten:
        return nullcontext()
    if work.algorithm == "gptq":
        return gptq(model, work)
    if work.algorithm in RESCALING:
        return rescaling(model, work, smoothings, batches)
    if work.algorithm in SWEEPS:
        from .modelopt_backend import sweeping

        return sweeping(model, work)
    from .autoround import autoround

    return autoround(model, work)


def _tensors(model: Any, work: LayerWork, kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those of `kept` parameters that have changed; what the modules add: packed tensors, or input
    scales only.
    """
    now = dict(model.named_parameters())
    found = {}
    for name, value in kept.items():
        if not torch.equal(now[name], value):
            found[name] = now[name].detach().cpu().clone()
    rewritten = {*work.rewritten}
    for name, scheme_name in work.schemes.items():
        module = model.get_submodule(name)
        scheme = SCHEMES[scheme_name]
        freeze_module_quantization(module)
        state: Any = without_none(get_direct_state_dict(module))
        specs = scheme.extra
        if name in rewritten:
            specs = scheme.tensors(*module.weight.shape)
            compressor = BaseCompressor.get_value_from_registry(scheme.format)
            state = compressor.compress(state, module.quantization_scheme)
        for spec in specs:
            value = state[spec.suffix].to(TORCH_DTYPES[spec.dtype]).reshape(spec.shape)
            found[f"{name}.{spec.suffix}"] = value.cpu().contiguous().clone()
    return found
