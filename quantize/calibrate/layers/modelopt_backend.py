"""NVIDIA's modelopt as the source of a layer's statistics: amax of inputs, and block scales of
weights by its sweeps.

In: a model of which one layer is real, the schemes of its modules, and the batches as
`layer.calibrate` runs them. Out: the observers of the modules hold modelopt's largest magnitudes,
and the modules hold the block scales that its sweep chose. Everything else is as with
llm-compressor: how a layer computes, which modules share a scale, what is packed.

Each static input has a `TensorQuantizer` of modelopt's, made from the plan's scheme, and modelopt's
own `max_calibrate` reads what a hook hands to it. No module is converted: no wildcard of modelopt's
and no rule about class names counts.

Easy to get wrong: modelopt 0.47.0 rounds NVFP4 weights in Triton kernels only. Its sweeps take
their rounding as an argument, so on a CPU they get the one below; on a GPU its NVFP4 sweeps take
their own kernel. And modelopt says with an AssertionError that an input is not finite: the batches
run again, and the message names the module.

Source: nvidia-modelopt 0.47.0 torch/quantization/model_calib.py (max_calibrate,
local_hessian_calibrate), calib/mse.py and qtensor/nvfp4_tensor.py;
modelopt_recipes/configs/ptq/presets/model (nvfp4_four_over_six). Equality with its own run over a
whole model: tests/quantize/calibrate/test_modelopt_backend.py.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

with warnings.catch_warnings():  # it has limits for transformers, of which nothing here depends
    warnings.simplefilter("ignore")
    from modelopt.torch.quantization.calib import MseCalibrator, NVFP4MSECalibrator
    from modelopt.torch.quantization.config import QuantizerAttributeConfig
    from modelopt.torch.quantization.model_calib import _LocalHessianAccumulator, max_calibrate
    from modelopt.torch.quantization.nn import TensorQuantizer

from ....checkpoints.values import row_ranges
from ....recipes.schemes import SCHEMES, SWEEPS, Scheme
from ..model.hooks import hooked, input_of
from .activations import e2m1
from .coverage import find_not_finite
from .work import LayerWork

_E4M3_MAX, _E4M3_MIN, _E2M1_MAX = 448.0, 2.0**-9, 6.0
_LARGEST_SCALE: Mapping[str, float] = {"four-over-six": 256.0}
"""Sweep -> the E4M3 scale of a group with the largest magnitude; room above it is for groups that
end at 4, not 6.
"""


class ModeloptBackend:
    """State: modelopt's quantizers of the inputs of a layer's modules, and the Hessians of their
    groups.
    """

    def __init__(self, model: Any, work: LayerWork):
        """Observes the modules that have a static input scale; the algorithm may sweep scales,
        too.
        """
        self._model, self._algorithm = model, work.algorithm
        self._modules: dict[str, Any] = {name: model.get_submodule(name) for name in work.schemes}
        schemes = {name: SCHEMES[scheme] for name, scheme in work.schemes.items()}
        self._quantizers = {
            name: _quantizer(scheme) for name, scheme in schemes.items() if scheme.extra
        }
        self._swept = work.rewritten if work.algorithm in SWEEPS else []
        self._hessians: dict[str, Any] = {}
        if work.algorithm == "local-hessian":
            shapes = {name: self._modules[name].weight.shape for name in self._swept}
            self._hessians = {
                name: _LocalHessianAccumulator(*shape, block_size=16)
                for name, shape in shapes.items()
            }

    def observe(self, run: Callable[[], None], batches: Any) -> None:
        """Let modelopt's calibrators see all batches, and give the observers what they found.

        Args:
            run: runs the batches through the model, once.
            batches: the same, to look for what is not finite.

        Raises:
            CheckpointError: names the module whose activations are not finite.
        """
        quantizers = nn.ModuleList(self._quantizers.values())
        hooks = {name: partial(self._read, name) for name in {**self._quantizers, **self._hessians}}
        handles = [
            self._modules[name].register_forward_pre_hook(hook, with_kwargs=True)
            for name, hook in hooks.items()
        ]
        try:
            with hooked(handles):
                max_calibrate(quantizers, lambda _: run(), distributed_sync=False)
        except AssertionError:
            find_not_finite(self._model, self._modules, batches)
            raise
        for name, quantizer in self._quantizers.items():
            found: Any = quantizer.amax
            if (
                found is not None
            ):  # None: a routed expert without a token, which has the range of the others
                observer = self._modules[name].input_observer
                amax = found.to(observer.max_vals.dtype).reshape(1)
                observer.min_vals, observer.max_vals = -amax, amax

    def set_weight_scales(self, fused: Sequence[tuple[str, ...]]) -> None:
        """Give the swept modules their block scales, in units of the largest magnitude of their
        fused group.

        Args:
            fused: modules that run as one; modelopt knows some of them by name, the plan knows all.
        """
        grouped = {name: group for group in fused for name in group}
        for name in self._swept:
            amax = torch.stack(
                [_largest(self._modules[each].weight) for each in grouped.get(name, (name,))]
            ).amax()
            # A weight of zeros has no largest magnitude, and its common scale must be finite all
            # the same.
            self._sweep(
                self._modules[name],
                name,
                torch.where(amax == 0, _E4M3_MAX * _E2M1_MAX, amax.float()),
            )

    def _sweep(self, module: Any, name: str, global_amax: Tensor) -> None:
        largest_scale = _LARGEST_SCALE.get(self._algorithm, _E4M3_MAX)
        hessian = self._hessians[name].normalized_hessian() if name in self._hessians else None
        scales: list[Tensor] = []
        for first, last in row_ranges(module.weight):
            rows = module.weight[first:last]
            amax = _swept_amax(rows, global_amax, self._algorithm, largest_scale, hessian)
            scales.append(
                _e4m3_scale(amax, global_amax, largest_scale).float().reshape(len(rows), -1)
            )
        module.weight_scale.data.copy_(torch.cat(scales))
        module.weight_global_scale.data.copy_(largest_scale * _E2M1_MAX / global_amax)

    def _read(self, name: str, _module: nn.Module, args: tuple, kwargs: dict) -> None:
        value = input_of(args, kwargs)
        if name in self._quantizers:
            self._quantizers[name](value)
        if name in self._hessians:
            self._hessians[name].accumulate(value)


def _largest(weight: Tensor) -> Tensor:
    """The largest magnitude, 0-d, without a copy of the weight."""
    low, high = torch.aminmax(weight)
    return torch.maximum(-low, high)


def _quantizer(scheme: Scheme) -> TensorQuantizer:
    """modelopt's quantizer of an input with one static scale: of NVFP4's groups, or of an FP8
    tensor.
    """
    if scheme.bits == 4:
        blocks = {-1: scheme.group_size, "type": "dynamic", "scale_bits": (4, 3)}
        return TensorQuantizer(QuantizerAttributeConfig(num_bits=(2, 1), block_sizes=blocks))
    return TensorQuantizer(QuantizerAttributeConfig(num_bits=(4, 3), axis=None))


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
    rounding = partial(_rounded, global_amax=global_amax, largest_scale=largest_scale)
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
        error = None if hessian is None else partial(_hessian_error, hessian=hessian)
        calibrator = NVFP4MSECalibrator(
            amax, global_amax, axis=0, quant_func=rounding, error_func=error, hessian=hessian
        )
    calibrator.collect(groups)
    found = calibrator.compute_amax()
    assert found is not None, "the sweep has seen a weight"
    return found.reshape(-1, 1)


def _rounded(groups: Tensor, amax: Tensor, *, global_amax: Tensor, largest_scale: float) -> Tensor:
    """Groups [G, 16] F32 rounded to E2M1 with these magnitudes [G, 1], as modelopt's Triton kernel
    rounds them.
    """
    unit = _e4m3_scale(amax, global_amax, largest_scale).float() * (
        global_amax / (_E2M1_MAX * largest_scale)
    )
    return e2m1(groups / unit).mul_(unit)


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
