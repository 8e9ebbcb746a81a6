"""A layer-by-layer harness over a tiny model, for tests of the llm-compressor back-end."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from commands import GLM, ROOT
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from keepmtp.quantize.calibrate.layers.forwards import calibrating
from keepmtp.quantize.calibrate.layers.layer import Calibrated, calibrate
from keepmtp.quantize.calibrate.layers.work import LayerWork
from keepmtp.quantize.calibrate.model import skeleton
from keepmtp.quantize.calibrate.model.hooks import hooked
from keepmtp.quantize.calibrate.model.skeleton import Batch
from keepmtp.recipes.conventions import CACHE_LEAVES
from keepmtp.recipes.schemes import SCHEMES, SWEEPS
from passes import plan_over
from torch import Tensor, nn
from writing import weights_of

MODELS = ROOT / "models"
QWEN = MODELS / "tiny-qwen3_5"
both_models = pytest.mark.parametrize("folder", [GLM, QWEN], ids=lambda folder: folder.name)
# What the recipes of these families keep in BF16.
KEPT = ("mlp.gate", "in_proj_a", "in_proj_b")
IGNORE = ["lm_head", *(f"re:.*{name.replace('.', '[.]')}$" for name in KEPT)]
LINEAR = {"targets": "Linear", "ignore": IGNORE}


def outliers(samples: int, width: int) -> list[Tensor]:
    """Hidden states [1, 32, width] with a few loud channels, as models have them."""
    generator = torch.Generator().manual_seed(0)
    loud = torch.exp2(torch.linspace(-2, 4, width))
    return [
        (torch.randn(1, 32, width, generator=generator) * loud).bfloat16() for _ in range(samples)
    ]


def token_ids(samples: int = 4, length: int = 32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 500, (1, length), generator=generator) for _ in range(samples)]


@dataclass
class Batches:
    """Sequences as inputs of one layer, as often as they are asked for."""

    skeleton: "Skeleton"
    index: int
    batches: list[Batch]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for batch in self.batches:
            with self.skeleton.fed(self.index, batch) as arguments:
                yield arguments


class Skeleton(skeleton.Skeleton):
    """keepmtp's own of a tiny model, whose layers are entered and left by hand."""

    def __init__(self, folder: Path):
        super().__init__(plan_over(folder, f"{folder.name}.nvfp4"), device=torch.device("cpu"))
        self.layers, self.weights = self._real, weights_of(folder)
        self._entered = ExitStack()

    def enter(self, index: int, ids: list[Tensor], hidden: list[Tensor] | None) -> Batches:
        """Gives layer `index` its weights and the batches that reach it."""
        self._entered.enter_context(self.layer(index))
        states = hidden or [None] * len(ids)
        batches = [
            Batch(ids=own, state=None if state is None else (state,))
            for own, state in zip(ids, states, strict=True)
        ]
        return Batches(self, index, batches)

    def calibrated(self, batches: Batches, schemes: str | dict[str, str], **work) -> Calibrated:
        """What is found in the layer that these batches reach; one scheme is that of all its
        linears.
        """
        if isinstance(schemes, str):
            schemes = dict.fromkeys(self.linears(batches.index), schemes)
        return calibrate(
            self.model, batches, LayerWork(schemes=schemes, **{"fused": fused(schemes)} | work)
        )

    def leave(self, index: int, batches: Batches) -> list[Tensor]:
        """The layer's outputs for the next one; its weights are gone afterwards."""
        outputs: list[Tensor] = []
        with (
            self._entered,
            hooked([self.layers[index].register_forward_hook(keeping(outputs))]),
            calibrating(self.model),
        ):
            for batch in batches:
                self.model(**batch)
        return outputs

    def linears(self, index: int) -> list[str]:
        """Modules of a layer that its recipe quantizes, in the model's names."""
        return [
            f"model.layers.{index}.{name}"
            for name, module in self.layers[index].named_modules()
            if isinstance(module, nn.Linear) and not name.endswith(KEPT)
        ]


def keeping(outputs: list[Tensor]) -> Callable[..., None]:
    """A hook that keeps the hidden states that a layer returns."""

    def keep(_module: object, _args: object, output: Any) -> None:
        outputs.append(output[0] if isinstance(output, tuple) else output)

    return keep


def tensors_of(name: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those of one module, by their last component."""
    parts = {key.rpartition("."): value for key, value in tensors.items()}
    return {leaf: value for (module, _, leaf), value in parts.items() if module == name}


def unpacked(state: dict[str, Tensor], scheme: str) -> Tensor:
    """A module's weight, decompressed by compressed-tensors."""
    compressor = BaseCompressor.get_value_from_registry(SCHEMES[scheme].format)
    given = QuantizationScheme(targets=[], **SCHEMES[scheme].config_group())
    return compressor.decompress(state, given)["weight"]


def fused(names: Iterable[str]) -> list[tuple[str, ...]]:
    """Those that llm-compressor fuses, as a plan does: they share a global scale."""
    groups: dict[str, list[str]] = {}
    for name in names:
        if name.endswith(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")):
            groups.setdefault(name.rpartition(".")[0], []).append(name)
    return [tuple(group) for group in groups.values()]


def layerwise(
    folder: Path, ids: list[Tensor], scheme: str, algorithm: str, *, caches: bool = False, **options
) -> tuple[Skeleton, list[Calibrated]]:
    """All layers of the model, one after the other, with one scheme or none; and the scales of
    their FP8 caches, which linear attention has not.
    """
    own, results, hidden = Skeleton(folder), [], None
    for index, layer in enumerate(own.layers):
        batches = own.enter(index, ids, hidden)
        if caches:
            scales = {f"model.layers.{index}.self_attn": CACHE_LEAVES}
            options["caches"] = scales if hasattr(layer, "self_attn") else {}
        schemes = dict.fromkeys(own.linears(index), scheme) if scheme else {}
        results.append(own.calibrated(batches, schemes, algorithm=algorithm, **options))
        for name, value in layer.named_parameters(f"model.layers.{index}"):
            if algorithm in ("minmax", *SWEEPS) and name in own.weights:
                assert torch.equal(value, own.weights[name]), f"{name} was changed"
        hidden = own.leave(index, batches)
    return own, results


def found_in(results: list[Calibrated]) -> dict[str, Tensor]:
    """The tensors of all layers."""
    return {name: value for result in results for name, value in result.tensors.items()}


def sequential(
    folder: Path, ids: list[Tensor], modifiers: list, *, smooths: bool = False
) -> nn.Module:
    """llm-compressor's own whole-model run; but for algorithms that rescale norms, zero-centred ones
    are as a server computes them.
    """
    from llmcompressor import oneshot
    from llmcompressor.modeling.moe.linearize import linearize_moe
    from torch.utils.data import DataLoader
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    linearize_moe(model)
    processor = SimpleNamespace(save_pretrained=lambda *_args, **_kwargs: None)
    loader = DataLoader([{"input_ids": x} for x in ids], batch_size=None)
    options = {"processor": processor, "pipeline": "sequential"}
    names = vars(sys.modules[oneshot.__module__])
    with nullcontext() if smooths else patch.dict(names, norm_calibration_context=nullcontext):
        oneshot(model=model, dataset=loader, recipe=modifiers, **options)
    return model


def reference_tensors(model: nn.Module, name: str) -> dict[str, Tensor]:
    """A module as llm-compressor would save it."""
    from compressed_tensors.compressors import compress_module

    module = model.get_submodule(name)
    compress_module(module)
    return {f"{name}.{key}": value for key, value in module.state_dict().items()}


def assert_same(results: list, model: nn.Module, *, all_tensors: bool) -> int:
    """Every statistic equals llm-compressor's to the bit; returns how many were compared."""
    parameters = {name: value.detach().clone() for name, value in model.named_parameters()}
    compared = 0
    for result in results:
        for module in result.coverage:
            expected = reference_tensors(model, module)
            ours = {name for name in result.tensors if name.rpartition(".")[0] == module}
            if all_tensors:
                assert {*expected} - ours <= {f"{module}.bias"}
            for name in ours:
                theirs = expected[name].to(result.tensors[name].dtype)
                assert torch.equal(result.tensors[name].double(), theirs.double()), name
                compared += 1
        for name in result.tensors:
            if name.rpartition(".")[0] not in result.coverage:
                assert torch.equal(result.tensors[name], parameters[name]), name
                compared += 1
    return compared
