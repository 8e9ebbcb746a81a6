"""keepmtp's matching of module names against vLLM's own functions, on names of all families and
random entries.

The peer runs in vLLM's environment (`.venv-vllm`, or VLLM_PYTHON) as one subprocess for all
questions.
"""

import random
from pathlib import Path

import foreign_form
import pytest
import releases
from checkpoint_files import as_source
from data_files import table
from good import released
from keepmtp.checkpoints.dialects.choose import read_dialect
from keepmtp.checkpoints.dialects.dialect import Dialect, UnknownDialect
from keepmtp.checkpoints.dialects.modelopt import ModelOpt
from keepmtp.checkpoints.dialects.runtime_view import Module, RuntimeView
from keepmtp.recipes.families import find_family, find_view
from real_vllm import ask

PEER = r"""
import json, sys
from functools import cache
from importlib.machinery import ModuleSpec
from unittest.mock import MagicMock
import torch
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.layers.quantization.compressed_tensors.utils import find_matched_target, should_ignore_layer
from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.model_executor.layers.quantization.modelopt import ModelOptMixedPrecisionConfig, ModelOptNvFp4Config
from vllm.model_executor.layers.quantization.auto_awq import AutoAWQConfig
from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQConfig
from vllm.model_executor.layers.quantization.inc import INCConfig
from vllm.model_executor.layers.quantization.quark.quark import QuarkConfig
from vllm.model_executor.layers.quantization.quark.utils import should_ignore_layer as quark_ignores
from vllm.model_executor.layers.quantization.utils.gptq_utils import get_dynamic_override, is_layer_gptq_quantized
from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.registry import ModelRegistry

# Image processors that are never called want a torchvision that vLLM's CPU build does without.
for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.v2"):
    sys.modules.setdefault(name, MagicMock(__spec__=ModuleSpec(name, None)))

@cache
def mapper(architecture):
    try:
        cls = ModelRegistry.models[architecture].load_model_cls()
    except (ImportError, AttributeError, RuntimeError, KeyError, TypeError) as error:
        print(architecture, repr(error), file=sys.stderr)
        return "none here"
    names = getattr(cls, "hf_to_vllm_mapper", None)
    return names and names.get_rename_mapper()

def configure(raw, architecture, packed):
    cls = {
        "compressed-tensors": CompressedTensorsConfig, "fp8": Fp8Config, "gptq": AutoGPTQConfig, "awq": AutoAWQConfig,
        "auto-round": INCConfig, "quark": QuarkConfig,
    }.get(raw["quant_method"])
    cls = cls or (ModelOptMixedPrecisionConfig if raw["quant_algo"] == "MIXED_PRECISION" else ModelOptNvFp4Config)
    config = cls.from_config(raw)
    names = mapper(architecture)
    if names == "none here":
        return None
    if names is not None:
        config.apply_vllm_mapper(names)
    config.packed_modules_mapping = packed
    return config

def layer(name):
    return type(name, (torch.nn.Module,), {})()

def is_plain(config, name, kind, packed):
    # What get_quant_method of each asks, without the kernels that it would choose.
    if isinstance(config, INCConfig):
        extra = config.extra_config or {}
        if any(extra[key].get("bits", 16) >= 16 for key in (name, f"model.{name}") if key in extra):
            return True
        asked = object.__new__(ParallelLMHead) if kind == "head" else layer("RoutedExperts")
        return config.config_parser._resolve_raw(asked, name)[0] >= 16
    if kind == "head":
        return True
    packed = {} if kind == "experts" else packed
    if isinstance(config, AutoGPTQConfig):
        is_stored = kind == "experts" or is_layer_gptq_quantized(name, config.modules_in_block_to_quantize, packed)
        return not is_stored or get_dynamic_override(config, name) is False
    if isinstance(config, AutoAWQConfig):
        return is_layer_skipped(name, config.modules_to_not_convert, packed, match_mode="substring")
    return quark_ignores(name, config.quant_config["exclude"], packed, check_children=kind == "experts")

def ask(config, module):
    name, packed = module["name"], config.packed_modules_mapping
    try:
        if isinstance(config, (AutoGPTQConfig, AutoAWQConfig, INCConfig, QuarkConfig)):
            return ["plain" if is_plain(config, name, module["kind"], packed) else "quantized", ""]
        if isinstance(config, CompressedTensorsConfig):
            if module["kind"] != "experts":
                if should_ignore_layer(name, ignore=config.ignore, fused_mapping=packed):
                    return ["plain", ""]
                kind = layer(module["class"])
                hit = find_matched_target(name, kind, config.target_scheme_map.keys(), packed)
                return ["quantized" if hit else "plain", hit or ""]
            config._add_fused_moe_to_target_scheme_map()
            answers = [config.get_scheme_dict(layer("RoutedExperts"), shard) for shard in module["shards"]]
            last = answers.pop()
            if not all(answer == last for answer in answers):
                return ["error", ""]
            return ["quantized" if last else "plain", ""]
        if isinstance(config, Fp8Config):
            if module["kind"] == "head":
                return ["plain", ""]
            skipped = is_layer_skipped(name, config.ignored_layers, packed)
            return ["plain" if skipped else "quantized", ""]
        if config.is_layer_excluded(name):
            return ["plain", ""]
        if isinstance(config, ModelOptMixedPrecisionConfig):
            return ["quantized" if config._resolve_quant_algo(name) else "plain", ""]
        return ["quantized", ""]
    except ValueError:
        return ["error", ""]

answers = []
for question in json.load(sys.stdin):
    config = configure(question["config"], question["architecture"], question["packed"])
    answers.append(None if config is None else [ask(config, module) for module in question["modules"]])
print("ANSWERS" + json.dumps(answers))
"""


def modules_of(model: str) -> list[Module]:
    checkpoint = released(model)
    view = find_view(checkpoint.config, model)
    runtime = RuntimeView(source=as_source(checkpoint, Path("/nonexistent")), view=view)
    asked = [module for module in runtime.modules if module.loads_quantized]
    return [module for module in asked if module.kind != "embedding"]  # tests/vllm asks about them


def some_entries(modules: list[Module], rng: random.Random, *, kind: str) -> list[str]:
    """Names as people write them: fused, by shard, on disk, as patterns, and half of a fused
    group.
    """
    entries: list[str] = []
    for module in rng.sample(modules, min(6, len(modules))):
        disk = [str(member.weight.module) for member in module.members]
        name = rng.choice([module.name, *module.shards, *disk[:3]])
        parent, _, last = name.rpartition(".")
        words = [
            [name],
            list(module.shards) or [name],
            [name.upper()],
            [f"{parent}."],
            [last],
            disk,
        ]
        if kind == "modelopt":
            words += [[f"{name}*"], [f"{parent}.*"], [f"*{last}"], [name[:-1]], [parent]]
        if kind == "compressed-tensors":
            escaped = name.replace(".", "\\.")
            words += [
                [f"re:^{escaped}$"],
                [f"re:.*{last}"],
                [f"re:{last}"],
                [f"re:^{parent}"],
                [f"re:{escaped}x"],
            ]
        entries += rng.choice(words)
    return entries


def some_configs(modules: list[Module], rng: random.Random):
    weights = {
        "num_bits": 8,
        "type": "float",
        "strategy": "channel",
        "symmetric": True,
        "dynamic": False,
    }
    group = {
        "weights": weights,
        "input_activations": {**weights, "strategy": "token", "dynamic": True},
    }
    for targets in (["Linear"], ["linear"], ["RoutedExperts", "QKVParallelLinear"], [], []):
        targets = targets or some_entries(modules, rng, kind="compressed-tensors")
        yield {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "ignore": some_entries(modules, rng, kind="compressed-tensors"),
            "config_groups": {"group_0": {**group, "targets": targets}},
        }
    for _ in range(4):
        ignore = some_entries(modules, rng, kind="modelopt")
        yield {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ignore}
        layers = {name: {"quant_algo": "FP8"} for name in some_entries(modules, rng, kind="fp8")}
        yield {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "ignore": ignore[:1],
            "quantized_layers": layers,
        }
        yield {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "ignored_layers": some_entries(modules, rng, kind="fp8"),
        }


def foreign_configs(modules: list[Module], rng: random.Random):
    def words(kind: str = "fp8") -> list[str]:
        return some_entries(modules, rng, kind=kind)

    def expressions() -> list[str]:
        return [
            word.removeprefix("re:")
            for word in words("compressed-tensors")
            if word.startswith("re:")
        ]

    for _ in range(2):
        signs = (rng.choice(["-:", "+:", ""]) for _ in range(100))
        dynamic = {
            f"{sign}{expression}": {}
            for sign, expression in zip(signs, expressions(), strict=False)
        }
        stored = [
            str(member.weight.module)
            for module in modules
            for member in module.members
            if rng.random() < 0.95
        ]
        yield foreign_form.SAID["gptq"] | {
            "dynamic": dynamic,
            "modules_in_block_to_quantize": rng.choice([stored, words()]),
        }
        yield foreign_form.SAID["awq"] | {"modules_to_not_convert": words() or ["lm_head"]}
        entries = {word: {"bits": rng.choice([4, 8, 16])} for word in (*words(), *expressions())}
        blocks = rng.choice([None, "model.layers", ["model.language_model.layers", "mtp.layers"]])
        yield foreign_form.SAID["auto-round"] | {
            "extra_config": entries,
            "block_name_to_quantize": blocks,
        }
        yield foreign_form.SAID["quark"] | {"exclude": words("compressed-tensors")}


def ours(dialect: Dialect, module: Module) -> list[str]:
    answer = dialect.resolve(module.name, shards=module.shards, kind=module.kind)
    if answer.error:
        return ["error", ""]
    return ["plain" if answer.built.form == "plain" else "quantized", answer.entry]


# Classes that vLLM's CPU build can import; the others' mappers are compared by the dry load's names
# and answers.
CPU_MODELS = table("checkpoints/dialects/test_dialects")["CPU_MODELS"]


@pytest.mark.full
@pytest.mark.vllm
def test_names_match_as_in_vllm():
    rng, other = random.Random(0), random.Random(2)
    asked, questions = [], []
    for model in releases.MODELS:
        config, modules = released(model).config, modules_of(model)
        family = find_family(config, model)
        architecture = family.with_vision if config.get("vision_config") else ""
        architecture = architecture or config["architectures"][0]
        packed = {
            module.name.rpartition(".")[2]: [shard.rpartition(".")[2] for shard in module.shards]
            for module in modules
            if module.shards and module.kind == "linear"
        }
        for raw in (*some_configs(modules, rng), *foreign_configs(modules, other)):
            asked.append(
                (model, read_dialect(config | {"quantization_config": raw}, None), modules, raw)
            )
            questions.append(
                {
                    "config": raw,
                    "architecture": architecture,
                    "packed": packed,
                    "modules": [
                        {
                            "name": m.name,
                            "kind": m.kind,
                            "shards": m.shards,
                            "class": "ParallelLMHead"
                            if m.kind == "head"
                            else "QKVParallelLinear"
                            if m.name.endswith(("qkv", "qkv_proj"))
                            else "MergedColumnParallelLinear"
                            if m.shards
                            else "RowParallelLinear",
                        }
                        for m in modules
                    ],
                }
            )
    answers = ask(PEER, questions)
    compared, kinds, not_here = 0, set(), set()
    for (model, dialect, modules, raw), theirs in zip(asked, answers, strict=True):
        if isinstance(dialect, UnknownDialect):  # Quark's for DeepSeek-V4
            continue
        if theirs is None:  # this vLLM cannot import the model class, see its stderr
            not_here.add(model)
            continue
        for module, answer in zip(modules, theirs, strict=True):
            mine = ours(dialect, module)
            assert mine[0] == answer[0], (model, module.name, module.shards, raw, mine, answer)
            if answer[1]:
                assert mine[1] == answer[1], (model, module.name, raw)
            compared += 1
            kinds.add((type(dialect), answer[0]))
    assert compared > 2000
    assert not not_here & set(CPU_MODELS), not_here
    assert len(kinds) >= 18, kinds
    assert any(
        isinstance(dialect, ModelOpt) and dialect.algorithm == "MIXED_PRECISION"
        for _, dialect, _, _ in asked
    )
