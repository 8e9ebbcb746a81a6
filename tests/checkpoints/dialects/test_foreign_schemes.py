"""Which scheme a config of compressed-tensors, Quark or AutoRound means: against vLLM's own functions, over random
configs of every kind.

One subprocess in vLLM's environment answers all questions.
"""

import random
from collections import Counter
from typing import Any

import pytest
from data_files import table
from foreign_form import SAID
from keepmtp.checkpoints.dialects.autoround import read_autoround
from keepmtp.checkpoints.dialects.compressed_tensors import read_compressed_tensors
from keepmtp.checkpoints.dialects.dialect import PLAIN, UNKNOWN, VLLMModule
from keepmtp.checkpoints.dialects.given import QuarkLayer
from keepmtp.checkpoints.dialects.gptq import read_awq, read_gptq
from keepmtp.checkpoints.dialects.quark import scheme_of
from keepmtp.recipes.family import Renames, VLLMName
from keepmtp.recipes.frozen import without_none
from keepmtp.recipes.renamer import Renamer
from real_vllm import ask

pytestmark = [pytest.mark.vllm, pytest.mark.full]

PEER = r"""
import json, re, sys
from importlib import import_module
from types import SimpleNamespace
from unittest.mock import MagicMock
import torch
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import CompressedTensorsScheme
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import compressed_tensors_moe as moe
from vllm.model_executor.layers.quantization.inc import INCConfig
from vllm.model_executor.layers.quantization.inc.schemes.factory import resolve_scheme
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.quantization.moe_wna16 import MoeWNA16Config, is_layer_skipped_quant
from vllm.model_executor.layers.quantization.quark.quark import QuarkConfig
from vllm.model_executor.layers.quantization.quark.quark_moe import QuarkMoEMethod
from vllm.model_executor.layers.quantization.utils.marlin_utils import check_moe_marlin_supports_config

def ask(layer, pack_method, is_experts):
    raw = {"export": {"kv_cache_group": [], "pack_method": pack_method}, "exclude": [], "layer_quant_config": {},
           "layer_type_quant_config": {}, "global_quant_config": layer}
    config = QuarkConfig.from_config(raw)
    try:
        if is_experts:
            return QuarkMoEMethod.get_moe_method_target(config, RoutedExperts, "model.layers.0.mlp.experts")[2].__name__
        return config._get_scheme_cls_from_config(layer)[2].__name__
    except (NotImplementedError, RuntimeError, ValueError, AttributeError, TypeError) as error:
        return f"{type(error).__name__}: {error}"

def ask_inc(raw, is_experts):
    layer = torch.nn.Module()
    try:
        config = INCConfig.from_config(raw)
        scheme = resolve_scheme(config.config_parser.resolve(layer, "model.layers.0.mlp.down_proj"))
        name = type(scheme).__name__
        if is_experts and name == "INCFp8Scheme":
            scheme.get_moe_method(config, layer, "", None)
        return name
    except (AssertionError, NotImplementedError, ValueError, TypeError, KeyError) as error:
        return f"{type(error).__name__}: {error}"

# Only which class is chosen is asked, and not whether this machine has a kernel for it.
CompressedTensorsConfig._check_scheme_supported = classmethod(lambda *_, match_exact=False, **__: not match_exact)
def takes(self, *_, weight_quant=None, is_static_input_scheme=None, **__):
    assert weight_quant is None or weight_quant.strategy != "block" or is_static_input_scheme is False
classes = CompressedTensorsScheme.__subclasses__()
for word in ("w4a4_mxfp4", "w4a8_mxfp4", "wna16", "w8a8_fp8", "w8a8_int8", "w4a4_nvfp4", "w8a8_mxfp8", "w4a8_fp8", "w4a8_int8"):
    module = import_module(f"{moe.__name__}_{word}")
    for name, each in [*vars(module).items()]:
        if name.startswith("select_"):
            setattr(module, name, lambda *_, **__: (None, None))
        elif re.search("W4A.Mxfp4MoE|WNA16MoE", name):
            classes.append(each)
for each in classes:
    each.__init__ = takes

def ask_group(raw, kind):
    try:
        config = CompressedTensorsConfig.from_config(raw)
        scheme = config.target_scheme_map["Linear"]
        if kind == 'experts':
            config.get_scheme_dict = lambda *_, **__: scheme | {"format": raw["format"]}
            return type(moe.CompressedTensorsMoEMethod.get_moe_method(config, MagicMock(), "experts")).__name__.replace("MoEMethod","")
        return type(config._get_scheme_from_parts(scheme["weights"], scheme["input_activations"])).__name__
    except (AssertionError, NotImplementedError, RuntimeError, ValueError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"

def skips(words):
    config = MoeWNA16Config.from_config({"quant_method": "gptq", "bits": 4, "group_size": 256, "sym": True})
    config.modules_to_not_convert = words
    return is_layer_skipped_quant("model.layers.3.mlp.experts", config.modules_to_not_convert)

def has_marlin(group_size):
    sizes = SimpleNamespace(hidden_dim=4096, intermediate_size_per_partition_unpadded=4096)
    return check_moe_marlin_supports_config(sizes, group_size, allow_tile_padding=True)

quark, inc, of_groups, groups, lists = json.load(sys.stdin)
answers = [[ask(*each) for each in quark], [ask_inc(*each) for each in inc], [ask_group(*each) for each in of_groups]]
answers.append([has_marlin(each) for each in groups])
answers.append([skips(words) for words in lists])
print("ANSWERS" + json.dumps(answers))
"""
TABLES = table("checkpoints/dialects/foreign_schemes")
FP8 = TABLES["quark"][0][0]


def some_keys(changes: str, rng: random.Random) -> dict[str, Any]:
    """At most two other values of a table."""
    table = TABLES[changes]
    keys = rng.sample(sorted(table), rng.choice([0, 0, 1, 2]))
    return {key: rng.choice(table[key]) for key in keys}


def changed(given: Any, rng: random.Random, *, in_list: bool = False) -> Any:
    """A tensor's config with up to two keys changed, alone or in a list."""
    if isinstance(given, list):
        if rng.random() >= 0.9:
            return given[:1]
        return [changed(part, rng, in_list=True) for part in given]
    if given is None:
        return rng.choice([None, None, FP8])
    given = without_none(given | some_keys("quark_changes", rng))
    if rng.random() < 0.1 and not in_list:
        return [given]
    return given


def some_layers(rng: random.Random) -> list[dict[str, Any]]:
    layers = [{"weight": weight, "input_tensors": inputs} for weight, inputs in TABLES["quark"]]
    for _ in range(1500):
        weight, inputs = rng.choice(TABLES["quark"])
        layers.append({"weight": changed(weight, rng), "input_tensors": changed(inputs, rng)})
    return [*layers, {"weight": FP8, "input_tensors": FP8, "output_tensors": FP8}, {"weight": None}]


def some_autorounds(rng: random.Random) -> list[dict[str, Any]]:
    known = TABLES["autoround"]
    others = [rng.choice(known) | some_keys("autoround_changes", rng) for _ in range(800)]
    return [*known, *others]


def some_groups(rng: random.Random) -> list[Any]:
    """Weights and inputs of compressed-tensors, with a format."""
    said = TABLES["compressed-tensors"]
    groups = []
    for _ in range(3000):
        group: dict[str, Any] = {"targets": ["Linear"]}
        for kind in ("weights", "input_activations"):
            given = rng.choice(said[kind])
            group[kind] = given and without_none(given | some_keys("argument_changes", rng))
        raw = {"config_groups": {"": group}, "format": rng.choice(said["formats"])}
        groups.append((raw, rng.choice(["linear", "experts"])))
    return groups


@pytest.fixture(scope="module")
def asked() -> Any:
    """All questions, and vLLM's answers: to those of each tool."""
    rng = random.Random(0)
    quark = [
        (layer, rng.choice(["reorder", "order", "none"]), is_experts)
        for layer in some_layers(rng)
        for is_experts in (False, True)
    ]
    inc = [(raw, is_experts) for raw in some_autorounds(rng) for is_experts in (False, True)]
    questions = {"quark": quark, "inc": inc, "of groups": some_groups(rng)}
    questions |= {name: TABLES[name] for name in ("groups", "lists")}
    answers = zip(questions.items(), ask(PEER, list(questions.values())), strict=True)
    return {name: [*zip(asked, given, strict=True)] for (name, asked), given in answers}


def form(built: VLLMModule | str) -> str:
    if isinstance(built, str):
        return "raises"
    return built.form


def test_a_config_has_the_scheme_that_vllm_says(asked):
    """Where vLLM raises, the check says so, or that it does not judge; and never else."""
    seen = Counter[str]()
    judged = Counter[str]()
    answers = []
    for (layer, pack_method, is_experts), theirs in asked["quark"]:
        ours = scheme_of(QuarkLayer.model_validate(layer), pack_method, is_experts=is_experts)
        answers.append(((layer, pack_method, is_experts), form(ours), theirs))
    for (raw, is_experts), theirs in asked["inc"]:
        kind = "experts" if is_experts else "linear"
        down = VLLMName("model.layers.0.mlp.down_proj")
        ours = read_autoround(raw, Renamer()).resolve(down, shards=(), kind=kind)
        built = ours.built
        if built == PLAIN:
            built = UNKNOWN  # more than 8 bits: vLLM's parser alone does not say it
        answers.append(((raw, kind), form(ours.error or built), theirs))
    for question, ours, theirs in answers:
        assert ours in TABLES["forms"].get(theirs, ("raises", "unknown")), (question, theirs, ours)
        seen[theirs.partition(":")[0]] += 1
        judged[ours] += 1
    assert (
        {name for name in TABLES["forms"] if name[0] in "QI"} < seen.keys()
        and seen["NotImplementedError"] > 100
        and seen["AssertionError"] > 50
    ), seen
    assert judged["raises"] > 5 * judged["unknown"], judged


def test_a_group_of_compressed_tensors_has_the_scheme_that_vllm_says(asked):
    """Of linear modules, and of experts."""
    forms = Counter[str]()
    down = VLLMName("model.layers.0.mlp.down_proj")
    for (raw, kind), theirs in asked["of groups"]:
        answer = read_compressed_tensors(raw, Renamer()).resolve(down, shards=[down], kind=kind)
        ours = form(answer.error or answer.built)
        wanted = TABLES["forms"].get(theirs, ("raises", "unknown"))
        assert ours in wanted, (raw, kind, theirs, ours)
        forms[ours] += 1
    assert len(forms) == 10 and forms["raises"] > 2 * forms["unknown"] > 0, forms


def test_experts_of_awq_in_other_groups_have_the_list_as_it_is_written(asked):
    """vLLM's mapper renames the list, and reads one from the headers where there is none; not for
    MoeWNA16.
    """
    experts = VLLMName("model.layers.3.mlp.experts")
    rename = Renamer(renames=Renames(prefixes={"language_model.": "model."}))
    for words, is_skipped in asked["lists"]:
        raw = SAID["awq"] | {"group_size": 256, "modules_to_not_convert": words}
        built = (
            read_awq(raw, rename, floats=["model.layers.3"])
            .resolve(experts, shards=(), kind="experts")
            .built
        )
        assert (built.form == "plain") == is_skipped, words


def test_experts_of_gptq_in_other_groups_are_excepted_by_nothing(asked):
    """Where Marlin has no kernel, vLLM's MoeWNA16 builds the experts packed whatever `dynamic` says
    (vllm #39475).
    """
    experts = VLLMName("model.layers.3.mlp.experts")
    for group_size, has_marlin in asked["groups"]:
        raw = SAID["gptq"] | {"group_size": group_size, "dynamic": {"-:.*": {}}}
        built = read_gptq(raw, Renamer(), ()).resolve(experts, shards=(), kind="experts").built
        assert (built.form == "plain") == has_marlin, group_size
