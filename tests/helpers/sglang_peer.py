"""SGLang's own classes, constructed without its kernels: which modules it builds, by which names,
and how.

In: the folder of an unpacked SGLang wheel as argument; on stdin a JSON list of questions, each with
a config.json and a part. Out: a line ANSWERS and a JSON list: the class, and for each module that
is built through SGLang's layers its prefix, its class, and what `get_quant_method` says.

Easy to get wrong: what is real here. Models, configs, quantization configs,
`ModelConfig._config_draft_model` and `_get_quantization_config` are SGLang's files, run. All else
of SGLang, and packages that are not installed, are empty stand-ins: a number where a number is
expected, a class where one is inherited from. A layer does not create parameters; it writes down
how it was asked for. The GPU is said to be a Blackwell, as `--gpu sm100` is elsewhere.
"""

import abc
import ast
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import sys
import types
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

ROOT = Path(sys.argv[1])
TABLE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
REAL = (
    "sglang.srt.models",
    "sglang.srt.configs",
    "sglang.srt.layers.quantization",
    "sglang.srt.layers.layer_boundary.stages",
    "sglang.srt.model_loader.checkpoint_quantization",
    "sglang.srt.model_loader.loader",
    "sglang.srt.model_loader.weight_utils",
)
EMPTY = frozenset(
    {"sglang.srt.models", "sglang.srt.configs", "sglang.srt.layers.quantization.gguf"}
)


DEFAULT_TRUE = ("SGLANG_OPT_FUSE_WQA_WKV",)
"""Switches of sglang/srt/environ.py that are on unless somebody turns them off, as far as they
change names.
"""


class Number(int):
    """Stands for whatever a stand-in is asked: 1 for a size, else 0; it can be called, entered and
    asked on.
    """

    def __getattr__(self, name: str) -> "Number":
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "disable_shared_experts_fusion":
            return True  # type: ignore[return-value]
        if name in ("get", *DEFAULT_TRUE):
            return Number(name in DEFAULT_TRUE or self)
        return Number(name.endswith(("size", "_last_rank", "_first_rank", "mamba_extra_buffer")))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        is_decorated = (
            len(args) == 1 and not kwargs and isinstance(args[0], type | types.FunctionType)
        )
        return args[0] if is_decorated else Number(self)

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __enter__(self) -> "Number":
        return self

    def __exit__(self, *args: object) -> bool:
        return False

    def __getitem__(self, key: Any) -> "Number":
        return Number(0)

    def __contains__(self, key: Any) -> bool:
        return False


class Asked(abc.ABCMeta):
    """Class attributes of a stand-in."""

    def __getattr__(cls, name: str) -> Number:
        if name.startswith("__"):
            raise AttributeError(name)
        return Number(0)


class Empty(nn.Module):
    """Base of every class of a stand-in."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def register_buffer(self, name: str, tensor: Any, persistent: bool = True) -> None:
        self._buffers[name] = tensor

    def register_parameter(self, name: str, param: Any) -> None:
        self._parameters[name] = param

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__"):
                raise
            return Number(0)


class Layer(Empty):
    """A layer of SGLang's: it notes by which prefix and config it was asked for, and what the
    config answers.
    """

    def __init__(
        self, *args: Any, quant_config: Any = None, prefix: str = "", **kwargs: Any
    ) -> None:
        super().__init__()
        given = [arg for arg in args if hasattr(arg, "get_quant_method")]
        sizes = [arg for arg in args if isinstance(arg, int)]
        self.output_size_per_partition = sizes[1] if len(sizes) > 1 else 1
        self.prefix = prefix
        self.answer = self._ask(given[0] if given else quant_config)
        weight = nn.Parameter(torch.empty(0, 1, 0), requires_grad=False)
        weight.weight_loader = Number(0)  # type: ignore[attr-defined]
        self._parameters["weight"], self._parameters["bias"] = weight, None

    def _ask(self, config: Any) -> list[str]:
        if config is None:
            return ["no config", ""]
        try:
            method = config.get_quant_method(self, self.prefix)
        except (
            ValueError,
            NotImplementedError,
            RuntimeError,
            ImportError,
            AssertionError,
            AttributeError,
        ) as error:
            return [f"{type(error).__name__}", str(error)]
        scheme = self.__dict__.get("scheme", self._modules.get("scheme"))
        return ["None" if each is None else type(each).__name__ for each in (method, scheme)]


def linear(module: types.ModuleType) -> None:
    """sglang.srt.layers.linear."""
    base = type("LinearBase", (Layer,), {})
    vars(module)["LinearBase"] = base
    names = (
        "QKVParallelLinear MergedColumnParallelLinear ColumnParallelLinear RowParallelLinear "
        "ReplicatedLinear MergedColumnParallelRepeatedLinear ColumnParallelBatchedLinear"
    )
    for name in names.split():
        vars(module)[name] = type(name, (base,), {})


def embedding(module: types.ModuleType) -> None:
    """sglang.srt.layers.vocab_parallel_embedding."""
    base = type("VocabParallelEmbedding", (Layer,), {})
    vars(module).update(
        VocabParallelEmbedding=base, ParallelLMHead=type("ParallelLMHead", (base,), {})
    )


class FusedMoE(Layer):
    """Routed experts; SGLang looks at its class."""


def experts(module: types.ModuleType) -> None:
    """sglang.srt.layers.moe.*."""
    vars(module).update(FusedMoE=FusedMoE, get_moe_impl_class=lambda config: FusedMoE)


def attention(module: types.ModuleType) -> None:
    """sglang.srt.layers.radix_attention."""
    vars(module)["RadixAttention"] = type("RadixAttention", (Layer,), {})


SPECIAL = {
    "sglang.srt.layers.linear": linear,
    "sglang.srt.layers.vocab_parallel_embedding": embedding,
    "sglang.srt.layers.moe.fused_moe_triton": experts,
    "sglang.srt.layers.moe.fused_moe_triton.layer": experts,
    "sglang.srt.layers.moe.ep_moe.layer": experts,
    "sglang.srt.layers.radix_attention": attention,
}


def layers_of(
    num_hidden_layers: int, layer_fn: Callable[..., nn.Module], prefix: str
) -> nn.ModuleList:
    """Decoder layers, each under its number."""
    under = f"{prefix}." if prefix else ""
    return nn.ModuleList(
        [layer_fn(idx=index, prefix=f"{under}{index}") for index in range(num_hidden_layers)]
    )


def make_layers(
    num_hidden_layers: int, layer_fn: Any, pp_rank: Any = None, *_: Any, prefix: str = "", **__: Any
) -> Any:
    """SGLang's function: the layers, and where pipelines are asked about also the range that this
    one has.
    """
    layers = layers_of(num_hidden_layers, layer_fn, prefix)
    return layers if pp_rank is None else (layers, 0, num_hidden_layers)


def make_pp_layers(num_hidden_layers: int, layer_fn: Any, prefix: str = "", **_: Any) -> Any:
    """SGLang's function: the layers and the range that this pipeline has."""
    return layers_of(num_hidden_layers, layer_fn, prefix), 0, num_hidden_layers


ANSWERS = {
    "add_prefix": lambda name, prefix: f"{prefix}.{name}" if prefix else f"{name}",
    "make_layers": make_layers,
    "make_pp_layers": make_pp_layers,
    "get_pp_indices": lambda count, *args: (0, count),
    "get_rope_config": lambda config: (10000.0, None),
    "declare_attn": lambda *args, **facts: types.SimpleNamespace(**facts),
    "declare_ffn": lambda *args, **facts: types.SimpleNamespace(**facts),
    "append_stages": lambda *stages, **kwargs: tuple(Number(0) for _ in stages),
    "resolve_linear_parallel_group": lambda *args: (None, 1),
    "is_cuda": lambda: True,
    "precompute_freqs_cis": lambda *args, **kwargs: torch.empty(1),
    "get_platform": lambda: types.SimpleNamespace(
        is_blackwell=True, is_sm100=True, is_sm120=False, is_sm90=False
    ),
    "register_customized_processor": lambda *args, **kwargs: lambda cls: cls,
    "get_cuda_version": lambda: (12, 8),
    "get_device_capability": lambda *args: (10, 0),
}


CLASS_MEMBERS = {
    "__class_getitem__": classmethod(lambda cls, key: cls),
    "__init_subclass__": classmethod(lambda cls, **_: None),
}


class StandIn(types.ModuleType):
    """A module that has every name."""

    def __getattr__(self, name: str) -> Any:
        if name == "__version__":
            return "3.0.0"
        if name.startswith("__"):
            raise AttributeError(name)
        if name in ANSWERS:
            return ANSWERS[name]
        full = f"{self.__name__}.{name}"
        if full in sys.modules or real_file(full):
            return importlib.import_module(full)
        bare = name.lstrip("_")
        is_class = bare[:1].isupper() and not bare.isupper()
        value = Asked(name, (Empty,), CLASS_MEMBERS) if is_class else Number(0)
        setattr(self, name, value)
        return value


def real_file(name: str) -> Path | None:
    """The file of SGLang that is run for a module; None for a stand-in."""
    place = ROOT / name.replace(".", "/")
    files = place / "__init__.py", place.with_suffix(".py")
    is_real = name.startswith(REAL) and name not in EMPTY
    return next(filter(Path.is_file, files), None) if is_real else None


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """SGLang's own files for REAL, stand-ins for the rest of what is absent."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] not in TABLE["absent"]:
            return None
        if file := real_file(name):
            return importlib.util.spec_from_file_location(name, file)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        module = StandIn(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        if fill := SPECIAL.get(module.__name__):
            fill(module)


sys.meta_path.insert(0, Finder())
torch.cuda.get_device_capability = lambda *args: (10, 0)  # type: ignore[assignment]
torch.cuda.Stream = torch.cuda.Event = type("Stream", (Empty,), {})  # type: ignore[assignment]


@cache
def classes_of(folder: str) -> dict[str, tuple[str, str]]:
    """Class name, and for configs `model_type`, -> module and name; of models only those that a
    file offers.
    """
    found: dict[str, tuple[str, str]] = {}
    for file in sorted((ROOT / "sglang/srt" / folder).glob("*.py")):
        body = ast.parse(file.read_text()).body
        offered = {
            name.id
            for line in body
            if getattr(line, "targets", None) and ast.unparse(line.targets[0]) == "EntryClass"
            for name in ast.walk(line.value)
            if isinstance(name, ast.Name)
        }
        for node in body:
            if isinstance(node, ast.ClassDef) and (folder != "models" or node.name in offered):
                place = found[node.name] = (f"sglang.srt.{folder}.{file.stem}", node.name)
                found.update({f"model_type {word}": place for word in _model_types(node)})
    return found


def _model_types(node: ast.ClassDef) -> Iterator[str]:
    for line in node.body:
        if isinstance(line, ast.Assign | ast.AnnAssign) and isinstance(line.value, ast.Constant):
            target = line.target if isinstance(line, ast.AnnAssign) else line.targets[0]
            if getattr(target, "id", "") == "model_type":
                yield line.value.value


def class_of(folder: str, name: str) -> Any:
    module, name = classes_of(folder)[name]
    found = importlib.import_module(module)
    assert not isinstance(found, StandIn), f"{module} is a stand-in"
    return getattr(found, name)


ALIASES = {"deepseek_v32": "deepseek_v3", "deepseek_v4": "deepseek_v3"}
"""As SGLang has them (utils/hf_transformers/common.py): a class of transformers with another
model_type.
"""


def config_of(values: dict[str, Any]) -> Any:
    """SGLang's class of the config, or transformers', or none."""
    from transformers import CONFIG_MAPPING, PretrainedConfig

    model_type = ALIASES.get(values["model_type"], values["model_type"])
    known = f"model_type {model_type}" in classes_of("configs")
    usual = CONFIG_MAPPING[model_type] if model_type in CONFIG_MAPPING else PretrainedConfig  # noqa: SIM401
    config = (class_of("configs", f"model_type {model_type}") if known else usual)(**values)
    if config.architectures is None:
        config.architectures = list(values["architectures"])
    for part in (
        config,
        getattr(config, "vision_config", None),
        getattr(config, "text_config", None),
    ):
        for key, value in TABLE["config"].items():
            if isinstance(part, PretrainedConfig) and getattr(part, key, None) is None:
                setattr(part, key, value)
    for key, value in (values.get("text_config") or {}).items():
        if not hasattr(config, key):
            setattr(config, key, value)
    return config


def answer(question: dict[str, Any]) -> dict[str, Any]:
    from sglang.srt.configs import model_config as configs

    configs.load_joint_head_config = lambda *_: None  # a file of other releases, asked of the Hub
    loader = importlib.import_module("sglang.srt.model_loader.loader")

    config = config_of(question["config"])
    model_config = object.__new__(configs.ModelConfig)
    text = getattr(config, "text_config", None) or getattr(config, "llm_config", None) or config
    vars(model_config).update(
        hf_config=config,
        hf_text_config=text,
        is_draft_model=question["part"] == "mtp",
        dtype=torch.bfloat16,
        **TABLE["model_config"],
        is_fp4_experts=question["config"]["model_type"] == "deepseek_v4",
    )
    model_config._config_draft_model()
    architecture = model_config.hf_config.architectures[0]
    if architecture not in classes_of("models"):
        return {"class": ""}
    built = class_of("models", architecture)
    loader.get_model_architecture = lambda config: (built, architecture)
    quant_config = None
    try:
        if question["config"].get("quantization_config"):
            model_config._verify_quantization()
            quant_config = loader._get_quantization_config(model_config, Number(0))
    except (ValueError, NotImplementedError, TypeError, KeyError) as error:
        return {"class": architecture, "config_error": f"{type(error).__name__}: {error}"}
    with torch.device("meta"):
        model = built(config=model_config.hf_config, quant_config=quant_config)
    return {
        "class": architecture,
        "modules": [
            {"prefix": each.prefix, "class": type(each).__name__, "answer": each.answer}
            for each in model.modules()
            if isinstance(each, Layer)
        ],
    }


def answered(question: dict[str, Any]) -> dict[str, Any]:
    """The answer; where the stand-ins do not carry a class, what it failed on."""
    try:
        return answer(question)
    except (
        ArithmeticError,
        AssertionError,
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
    ) as error:
        return {"not_constructed": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    print("ANSWERS" + json.dumps([answered(question) for question in json.load(sys.stdin)]))
