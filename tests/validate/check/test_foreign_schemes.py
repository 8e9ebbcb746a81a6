"""Which scheme a config of Quark or AutoRound means: against vLLM's own functions, over random
configs of every kind.

One subprocess in vLLM's environment answers all questions.
"""

import json
import os
import random
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from checkpoint_files import write
from foreign_form import AUTOROUND, AWQ, GPTQ, gptq, quark_nvfp4
from keepmtp.recipes.family import Renames, VLLMName
from keepmtp.recipes.renamer import Renamer
from keepmtp.validate.check.check import check
from keepmtp.validate.check.dialects.autoround import read_autoround
from keepmtp.validate.check.dialects.given import QuarkLayer
from keepmtp.validate.check.dialects.gptq import read_awq, read_gptq
from keepmtp.validate.check.dialects.quark import scheme_of
from keepmtp.validate.check.vllm_module import PLAIN, UNKNOWN, VLLMModule

VLLM_PYTHON = Path(
    os.environ.get("VLLM_PYTHON", Path(__file__).parents[3] / ".venv-vllm" / "bin" / "python")
)
PEER = r"""
import json, sys
from types import SimpleNamespace
import torch
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

def skips(words):
    config = MoeWNA16Config.from_config({"quant_method": "gptq", "bits": 4, "group_size": 256, "sym": True})
    config.modules_to_not_convert = words
    return is_layer_skipped_quant("model.layers.3.mlp.experts", config.modules_to_not_convert)

def has_marlin(group_size):
    sizes = SimpleNamespace(hidden_dim=4096, intermediate_size_per_partition_unpadded=4096)
    return check_moe_marlin_supports_config(sizes, group_size, allow_tile_padding=True)

quark, inc, groups, lists = json.load(sys.stdin)
answers = [[ask(*each) for each in quark], [ask_inc(*each) for each in inc], [has_marlin(each) for each in groups]]
answers.append([skips(words) for words in lists])
print("ANSWERS" + json.dumps(answers))
"""
# What the check may take a class of vLLM's for.
FORMS = {
    "QuarkNVFP4": ("nvfp4_modelopt",),
    "QuarkNvfp4MoEMethod": ("nvfp4_modelopt",),
    "QuarkW8A8Fp8": ("fp8_tensor", "fp8_channel"),
    "QuarkW8A8Fp8MoEMethod": ("fp8_tensor", "fp8_channel", "fp8_block"),
    "QuarkW8A8Fp8PerBlock": ("fp8_block",),
    "QuarkW8A8Int8": ("int8", "unknown"),
    "QuarkW8A8Int8MoEMethod": ("int8", "unknown"),
    "QuarkW4A16Int4": ("unknown",),
    "QuarkW4A16Int4MoEMethod": ("unknown",),
    "QuarkW4A8_MXFP4_FP8": ("mxfp4",),
    "QuarkOCP_MX": ("mxfp4", "mxfp8", "unknown"),
    "QuarkOCP_MX_MoEMethod": ("mxfp4", "mxfp8", "unknown"),
    "QuarkW4A8Fp8MoEMethod": ("unknown",),
    "INCFp8Scheme": ("fp8_block",),
    "INCMxfp4Scheme": ("mxfp4",),
    "INCMxfp8Scheme": ("mxfp8",),
    "INCWna16Scheme": ("gptq", "awq", "unknown"),
}
FP8 = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False, "symmetric": True}
FP4 = {"dtype": "fp4", "qscheme": "per_group", "group_size": 16, "is_dynamic": False}
MX = {
    "dtype": "fp4",
    "qscheme": "per_group",
    "group_size": 32,
    "scale_format": "e8m0",
    "is_dynamic": False,
}
BLOCK = {
    "dtype": "fp8_e4m3",
    "qscheme": "per_block",
    "block_size": [128, 128],
    "is_dynamic": False,
    "symmetric": True,
}
GROUP = {
    "dtype": "fp8_e4m3",
    "qscheme": "per_group",
    "group_size": 128,
    "is_dynamic": True,
    "symmetric": True,
}
INT4 = {
    "dtype": "int4",
    "qscheme": "per_channel",
    "ch_axis": 0,
    "symmetric": True,
    "is_dynamic": False,
}
ROW = {"dtype": "int8", "qscheme": "per_channel", "is_dynamic": True, "symmetric": True}
KNOWN: tuple[tuple[Any, Any], ...] = (
    (FP8, FP8),
    (FP8 | {"qscheme": "per_channel"}, FP8 | {"qscheme": "per_channel", "is_dynamic": True}),
    (BLOCK, GROUP),
    (MX, MX | {"is_dynamic": True}),
    (MX, None),
    (MX, FP8),
    (MX | {"dtype": "fp8_e4m3"}, MX | {"dtype": "fp8_e4m3", "is_dynamic": True}),
    ([FP4, FP8], [FP4 | {"is_dynamic": True}, FP8]),
    ([FP8, INT4], FP8),
    (ROW | {"is_dynamic": False}, ROW),
    (INT4 | {"group_size": 128, "qscheme": "per_group"}, None),
)
CHANGES: dict[str, tuple[Any, ...]] = {
    "dtype": ("fp8_e4m3", "int8", "int4", "uint4", "fp4", "fp6_e3m2", "int3"),
    "qscheme": ("per_tensor", "per_channel", "per_group", "per_block"),
    "is_dynamic": (True, False, None),
    "symmetric": (True, False, None),
    "group_size": (16, 32, 128, None),
    "scale_format": ("e8m0", None),
    "block_size": ([128, 128], [64, 128], [1, 32], None),
    "scale_type": ("float8_e8m0fnu", None),
}


def changed(given: Any, rng: random.Random, *, in_list: bool = False) -> Any:
    """A tensor's config with up to two keys changed, alone or in a list."""
    if isinstance(given, list):
        return (
            [changed(each, rng, in_list=True) for each in given]
            if rng.random() < 0.9
            else given[:1]
        )
    if given is None:
        return rng.choice([None, None, FP8])
    given = dict(given)
    for key in rng.sample(sorted(CHANGES), rng.choice([0, 0, 1, 2])):
        value = rng.choice(CHANGES[key])
        given.pop(key, None) if value is None else given.update({key: value})
    return [given] if rng.random() < 0.1 and not in_list else given


def some_layers(rng: random.Random) -> list[dict[str, Any]]:
    layers = [{"weight": weight, "input_tensors": inputs} for weight, inputs in KNOWN]
    for _ in range(1500):
        weight, inputs = rng.choice(KNOWN)
        layers.append({"weight": changed(weight, rng), "input_tensors": changed(inputs, rng)})
    return [*layers, {"weight": FP8, "input_tensors": FP8, "output_tensors": FP8}, {"weight": None}]


MXFP4 = {
    "quant_method": "auto-round",
    "bits": 4,
    "group_size": 32,
    "sym": True,
    "data_type": "mx_fp",
}
AUTOROUNDS: tuple[dict[str, Any], ...] = (
    AUTOROUND,
    AUTOROUND | {"packing_format": "auto_round:auto_awq", "sym": False},
    MXFP4,
    MXFP4 | {"bits": 8},
    {
        "quant_method": "auto-round",
        "bits": 8,
        "group_size": [128, 128],
        "sym": True,
        "data_type": "fp8",
    },
)
INC_CHANGES: dict[str, tuple[Any, ...]] = {
    "bits": (2, 4, 8, 16),
    "group_size": (32, 128, -1, [128, 128], [1, 2, 3]),
    "sym": (True, False),
    "data_type": ("int", "fp", "fp8", "mx_fp", "mx_fp4e2m1", "nv_fp"),
    "packing_format": (
        "auto_round:auto_gptq",
        "auto_round:auto_awq",
        "auto_round:fp8",
        "auto_round:llm_compressor",
        "x",
    ),
    "backend": ("auto", "gptq:marlin", "awq", "exllama"),
    "act_bits": (8, 16),
    "act_dynamic": (True, False),
    "fmt": ("e4m3", "e5m2"),
}
LISTS = (
    [],
    ["lm_head"],
    ["layers.3"],
    ["experts.0"],
    ["model.layers.3.mlp.experts"],
    ["language_model.layers.3"],
)
GROUPS = (-1, 8, 16, 32, 64, 128, 256, 512, 1024)


def some_autorounds(rng: random.Random) -> list[dict[str, Any]]:
    configs = [*AUTOROUNDS]
    for _ in range(600):
        changed_keys = rng.sample(sorted(INC_CHANGES), rng.choice([0, 1, 2]))
        configs.append(
            rng.choice(AUTOROUNDS) | {key: rng.choice(INC_CHANGES[key]) for key in changed_keys}
        )
    return configs


@pytest.fixture(scope="module")
def asked() -> Any:
    """All questions, and vLLM's answers: to Quark's, and to AutoRound's."""
    if not VLLM_PYTHON.is_file():
        pytest.skip("no vLLM environment: make .venv-vllm, or set VLLM_PYTHON")
    rng = random.Random(0)
    quark = [
        (layer, rng.choice(["reorder", "order", "none"]), is_experts)
        for layer in some_layers(rng)
        for is_experts in (False, True)
    ]
    inc = [(raw, is_experts) for raw in some_autorounds(rng) for is_experts in (False, True)]
    done = subprocess.run(
        [VLLM_PYTHON, "-c", PEER],
        input=json.dumps([quark, inc, GROUPS, LISTS]),
        capture_output=True,
        text=True,
        env=os.environ | {"VLLM_LOGGING_LEVEL": "ERROR"},
    )
    assert "ANSWERS" in done.stdout, done.stderr[-3000:]
    answers = json.loads(done.stdout.rpartition("ANSWERS")[2])
    questions = {"quark": quark, "inc": inc, "groups": GROUPS, "lists": LISTS}
    return {
        name: [*zip(asked, given, strict=True)]
        for (name, asked), given in zip(questions.items(), answers, strict=True)
    }


def form(built: VLLMModule | str) -> str:
    return "raises" if isinstance(built, str) else built.form


@pytest.mark.full
@pytest.mark.vllm
def test_a_config_has_the_scheme_that_vllm_says(asked):
    """Where vLLM raises, the check says so, or that it does not judge; and never else."""
    seen, judged = Counter[str](), Counter[str]()
    answers = []
    for (layer, pack_method, is_experts), theirs in asked["quark"]:
        ours = scheme_of(QuarkLayer.model_validate(layer), pack_method, is_experts=is_experts)
        answers.append(((layer, pack_method, is_experts), form(ours), theirs))
    for (raw, is_experts), theirs in asked["inc"]:
        kind = "experts" if is_experts else "linear"
        down = VLLMName("model.layers.0.mlp.down_proj")
        ours = read_autoround(raw, Renamer()).resolve(down, shards=(), kind=kind)
        # More than 8 bits is plain, which vLLM's parser alone does not say.
        ours = ours.error or (UNKNOWN if ours.built == PLAIN else ours.built)
        answers.append(((raw, kind), form(ours), theirs))
    for question, ours, theirs in answers:
        assert ours in FORMS.get(theirs, ("raises", "unknown")), (question, theirs, ours)
        seen[theirs.partition(":")[0]] += 1
        judged[ours] += 1
    assert (
        set(FORMS) < seen.keys()
        and seen["NotImplementedError"] > 100
        and seen["AssertionError"] > 50
    ), seen
    assert judged["raises"] > 5 * judged["unknown"], judged


def test_an_entry_for_one_projection_makes_all_experts_plain(tmp_path):
    """sglang #38870 has packed MTP experts beside a plain rest: one name below the experts is
    enough for vLLM.
    """
    checkpoint = quark_nvfp4(mtp="NVFP4", exclude=["model.layers.3.mlp.experts.0.gate_proj"])
    (finding,) = check(write(tmp_path / "checkpoint", checkpoint)).findings
    assert finding.where == "model.layers.3.mlp.experts.0.down_proj.weight"
    assert "Narrow the entry 'model.layers.3.mlp.experts.0.gate_proj'" in finding.cure


@pytest.mark.vllm
def test_experts_of_awq_in_other_groups_have_the_list_as_it_is_written(asked):
    """vLLM's mapper renames the list, and reads one from the headers where there is none; not for
    MoeWNA16.
    """
    experts, rename = (
        VLLMName("model.layers.3.mlp.experts"),
        Renamer(renames=Renames(prefixes={"language_model.": "model."})),
    )
    for words, is_skipped in asked["lists"]:
        raw = AWQ | {"group_size": 256, "modules_to_not_convert": words}
        built = (
            read_awq(raw, rename, floats=["model.layers.3"])
            .resolve(experts, shards=(), kind="experts")
            .built
        )
        assert (built.form == "plain") == is_skipped, words


@pytest.mark.vllm
def test_experts_of_gptq_in_other_groups_are_excepted_by_nothing(asked):
    """Where Marlin has no kernel, vLLM's MoeWNA16 builds the experts packed whatever `dynamic` says
    (vllm #39475).
    """
    experts = VLLMName("model.layers.3.mlp.experts")
    for group_size, has_marlin in asked["groups"]:
        raw = GPTQ | {"group_size": group_size, "dynamic": {"-:.*": {}}}
        built = read_gptq(raw, Renamer(), ()).resolve(experts, shards=(), kind="experts").built
        assert (built.form == "plain") == has_marlin, group_size


def test_plain_experts_beside_such_groups_have_another_cure(tmp_path):
    checkpoint = gptq(dynamic={r"-:^model\.layers\.3\.": {}})
    checkpoint.quantization["group_size"] = 256
    found = check(write(tmp_path / "checkpoint", checkpoint)).findings
    of_block = [each for each in found if each.where.startswith("model.layers.3.mlp.experts.")]
    assert [each.cure for each in of_block] == [
        "Quantize again in groups of 128: in other groups no entry excepts experts"
    ]
