"""A layer-by-layer harness over a tiny model, as small as it can be, for tests of the
llm-compressor back-end.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from keepmtp.quantize.calibrate.layers.forwards import propagating
from keepmtp.quantize.calibrate.layers.layer import Calibrated, calibrate
from keepmtp.quantize.calibrate.layers.work import LayerWork
from keepmtp.quantize.calibrate.model.experts import linear_experts
from keepmtp.recipes.schemes import SCHEMES
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

MODELS = Path(__file__).parents[2] / "models"
GLM, QWEN = MODELS / "tiny-glm4-moe", MODELS / "tiny-qwen3_5"
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


class Stub(nn.Module):
    """A layer without weights: it answers what is put into it, or what it is given."""

    def __init__(self, real: nn.Module):
        super().__init__()
        self.__dict__["real"] = real
        self.answer: Tensor | None = None

    def forward(self, hidden_states: Tensor, *_args, **_kwargs) -> Tensor:
        return hidden_states if self.answer is None else self.answer

    def __getattr__(self, name: str):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["real"], name)


class Batches:
    """Token ids, with the hidden states of the layer before in its stub."""

    def __init__(
        self, index: int, ids: list[Tensor], stub: Stub | None, hidden: list[Tensor] | None
    ):
        self.index, self.ids, self.stub, self.hidden = index, ids, stub, hidden

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for index, ids in enumerate(self.ids):
            if self.stub is not None and self.hidden is not None:
                self.stub.answer = self.hidden[index]
            yield {"input_ids": ids}


class Skeleton:
    """The model of a folder on meta, of which one layer at a time has weights."""

    def __init__(self, folder: Path):
        config = AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            self.model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        self.model.eval()
        linear_experts(self.model)
        self.weights: dict[str, Tensor] = {}
        for file in folder.glob("*.safetensors"):
            with safe_open(file, "pt") as handle:
                self.weights |= {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
        self.base = self.model.model
        self.layers = list(self.base.layers)
        self._load(self.base.embed_tokens, "model.embed_tokens.")
        self.base.rotary_emb = type(self.base.rotary_emb)(config)
        self.base.norm, self.model.lm_head = nn.Identity(), nn.Identity()
        self.stubs = [Stub(layer) for layer in self.layers]
        for index, stub in enumerate(self.stubs):
            self.base.layers[index] = stub

    def enter(self, index: int, ids: list[Tensor], hidden: list[Tensor] | None) -> Batches:
        """Gives layer `index` its weights and the batches that reach it."""
        self._load(self.layers[index], f"model.layers.{index}.")
        self.base.layers[index] = self.layers[index]
        return Batches(index, ids, self.stubs[index - 1] if index else None, hidden)

    def calibrated(self, batches: "Batches", schemes: str | dict[str, str], **work) -> Calibrated:
        """What is found in the layer that these batches reach; one scheme is that of all its
        linears.
        """
        if isinstance(schemes, str):
            schemes = dict.fromkeys(self.linears(batches.index), schemes)
        return calibrate(
            self.model, batches, LayerWork(schemes=schemes, **{"fused": fused(schemes)} | work)
        )

    def leave(self, index: int, batches: Batches) -> list[Tensor]:
        """The layer's outputs for the next one; its place is taken by its stub again."""
        outputs: list[Tensor] = []
        handle = self.layers[index].register_forward_hook(keeping(outputs))
        with propagating(self.model):
            for batch in batches:
                self.model(**batch)
        handle.remove()
        self.base.layers[index] = self.stubs[index]
        for stub in self.stubs:
            stub.answer = None
        return outputs

    def linears(self, index: int) -> list[str]:
        """Modules of a layer that its recipe quantizes, in the model's names."""
        return [
            f"model.layers.{index}.{name}"
            for name, module in self.layers[index].named_modules()
            if isinstance(module, nn.Linear) and not name.endswith(KEPT)
        ]

    def _load(self, module: nn.Module, prefix: str) -> None:
        names = [name for name in module.state_dict() if prefix + name in self.weights]
        weights = {name: self.weights[prefix + name].clone() for name in names}
        module.load_state_dict(weights, assign=True, strict=False)
        assert not any(parameter.is_meta for parameter in module.parameters()), (
            "the checkpoint lacks weights"
        )


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
    folder: Path, ids: list[Tensor], scheme: str | Callable[[str], str], algorithm: str, **options
) -> tuple[Skeleton, list[Calibrated]]:
    """All layers of the model, one after the other, with one scheme (or one by name)."""
    skeleton = Skeleton(folder)
    hidden: list[Tensor] | None = None
    results = []
    for index in range(len(skeleton.layers)):
        batches = skeleton.enter(index, ids, hidden)
        schemes = {
            name: scheme if isinstance(scheme, str) else scheme(name)
            for name in skeleton.linears(index)
        }
        results.append(skeleton.calibrated(batches, schemes, algorithm=algorithm, **options))
        hidden = skeleton.leave(index, batches)
    return skeleton, results


def sequential(folder: Path, ids: list[Tensor], modifiers: list) -> nn.Module:
    """llm-compressor's own whole-model run."""
    from llmcompressor import oneshot
    from llmcompressor.modeling.moe.linearize import linearize_moe
    from torch.utils.data import DataLoader
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    linearize_moe(model)
    processor = SimpleNamespace(save_pretrained=lambda *_args, **_kwargs: None)
    loader = DataLoader([{"input_ids": x} for x in ids], batch_size=None)
    options = {"processor": processor, "pipeline": "sequential"}
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
