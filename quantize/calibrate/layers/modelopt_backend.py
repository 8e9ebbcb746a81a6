"""NVIDIA's modelopt as the source of a layer's block scales: its sweeps over NVFP4 weights.

In: a model of which one layer is real, the schemes of its modules, and the batches as
`layer.calibrate` runs them. Out: the modules hold the block scales that its sweep chose. Everything
else is as with llm-compressor: how a layer computes, which modules share a scale, what is packed.
The largest inputs, too, are those that its own calibrators find, to the bit.

No module is converted: no wildcard of modelopt's and no rule about class names counts.

Easy to get wrong: modelopt 0.47.0 rounds NVFP4 weights in Triton kernels only. Its sweeps take
their rounding as an argument, so on a CPU they get the one below; on a GPU its NVFP4 sweeps take
their own kernel.

Source: nvidia-modelopt 0.47.0 torch/quantization/model_calib.py (local_hessian_calibrate),
calib/mse.py and qtensor/nvfp4_tensor.py; modelopt_recipes/configs/ptq/presets/model
(nvfp4_four_over_six). Equality with its own run over a whole model:
tests/quantize/calibrate/layers/test_modelopt_backend.py.
"""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

with warnings.catch_warnings():  # it has limits for transformers, of which nothing here depends
    warnings.simplefilter("ignore")
    from modelopt.torch.quantization.calib import MseCalibrator, NVFP4MSECalibrator
    from modelopt.torch.quantization.model_calib import _LocalHessianAccumulator

from ....checkpoints.values import row_ranges
from ..model.hooks import hooked_before, modules_of
from .activations import e2m1
from .work import LayerWork

_E4M3_MAX, _E4M3_MIN, _E2M1_MAX = 448.0, 2.0**-9, 6.0
# Sweep -> the E4M3 scale of a group with the largest magnitude; room above it is for groups that
# end at 4, not 6.
_LARGEST_SCALE: Mapping[str, float] = {"four-over-six": 256.0}


@contextmanager
def sweeping(model: Any, work: LayerWork) -> Iterator[None]:
    """Sums what the sweep needs of the inputs while it lasts, and sweeps block scales at its end.

    The scales are in units of the largest magnitude of a fused group; modelopt knows some of these
    by name, the plan knows all.

    Args:
        model: its modules have their schemes (`work.attach`).
        work: on the layer, by one of `SWEEPS`.
    """
    modules = modules_of(model, work.rewritten)
    hessians = {}
    if work.algorithm == "local-hessian":
        for name, module in modules.items():
            hessians[name] = _LocalHessianAccumulator(*module.weight.shape, block_size=16)

    def accumulate(name: str, _module: object, args: tuple[Tensor, ...]) -> None:
        hessians[name].accumulate(args[0])

    hooks = {}
    grouped = {}
    for name in hessians:
        hooks[modules[name]] = partial(accumulate, name)
    with hooked_before(hooks):
        yield
    for group in work.fused:
        grouped |= dict.fromkeys(group, group)
    largest_scale = _LARGEST_SCALE.get(work.algorithm, _E4M3_MAX)
    for name, module in modules.items():
        group = map(model.get_submodule, grouped.get(name, (name,)))
        amax = torch.stack([torch.stack(torch.aminmax(m.weight)).abs().amax() for m in group])
        # A weight of zeros has no largest magnitude, and its common scale must be finite all the
        # same.
        common = torch.where(amax.amax() == 0, _E4M3_MAX * _E2M1_MAX, amax.amax().float())
        hessian = None
        if name in hessians:
            hessian = hessians[name].normalized_hessian()
        scales = []
        for first, last in row_ranges(module.weight):
            rows = module.weight[first:last]
            ends = _swept_amax(rows, common, work.algorithm, largest_scale, hessian)
            scales.append(_e4m3_scale(ends, common, largest_scale).float().reshape(len(rows), -1))
        module.weight_scale.data.copy_(torch.cat(scales))
        module.weight_global_scale.data.copy_(largest_scale * _E2M1_MAX / common)


def _swept_amax(
    rows_NK: Tensor,
    global_amax: Tensor,
    algorithm: str,
    largest_scale: float,
    hessian: Tensor | None,
) -> Tensor:
    """[groups, 1] F32: the magnitude that each group of 16 ends at, by modelopt's sweep over its
    candidates.
    """
    groups = rows_NK.reshape(-1, 16)
    amax = groups.abs().amax(dim=-1, keepdim=True).float()

    def rounding(groups: Tensor, amax: Tensor) -> Tensor:
        """Groups [G, 16] F32 rounded to E2M1 with these magnitudes [G, 1], as modelopt's Triton
        kernel rounds them.
        """
        unit = _e4m3_scale(amax, global_amax, largest_scale).float()
        unit = unit * (global_amax / (_E2M1_MAX * largest_scale))
        return e2m1(groups / unit).mul_(unit)

    if algorithm == "four-over-six":
        calibrator = MseCalibrator(
            amax,
            axis=0,
            start_multiplier=1.0,
            stop_multiplier=1.5,
            step_size=0.5,
            quant_func=rounding,
        )
    else:
        error = None
        if hessian is not None:
            error = partial(_hessian_error, hessian=hessian)
        calibrator = NVFP4MSECalibrator(
            amax, global_amax, axis=0, quant_func=rounding, error_func=error, hessian=hessian
        )
    calibrator.collect(groups)
    found = calibrator.compute_amax()
    assert found is not None, "the sweep has seen a weight"
    return found.reshape(-1, 1)


def _e4m3_scale(amax: Tensor, global_amax: Tensor, largest_scale: float) -> Tensor:
    """The E4M3 scale of a group that ends at `amax`; as modelopt's exporter clamps it, 1.0 times it
    for zeros.
    """
    scale = torch.where(amax == 0, 1.0, amax / _E2M1_MAX)
    scale = scale * largest_scale / (global_amax / _E2M1_MAX)
    return scale.clamp(min=_E4M3_MIN, max=_E4M3_MAX).to(torch.float8_e4m3fn)


def _hessian_error(groups: Tensor, rounded: Tensor, *, hessian: Tensor) -> Tensor:
    """The error of each group in the layer's output, at each of its places: dw H dw, with H [K //
    16, 16, 16].
    """
    difference = (groups - rounded).view(-1, *hessian.shape[:2])
    error = torch.einsum("cnb,nbd,cnd->cn", difference, hessian, difference)
    return error.reshape(-1, 1).expand(-1, groups.shape[-1])
