"""What keepmtp says and writes for SGLang, compared with SGLang's own classes: what they build for
the modules of a config.json.

Easy to get wrong: SGLang is not installed. Its wheel, which `make test` downloads without
dependencies, is unpacked, and sglang_peer.py constructs its classes without kernels, in a process
of its own.
"""

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import releases
import sglang_table
from checked import check
from checkpoint_files import Checkpoint, as_source
from commands import ROOT, captured
from data_files import table
from good import ours, planned, released
from keepmtp.checkpoints.dialects.choose import quantization_of
from keepmtp.checkpoints.dialects.modules import runtime_modules
from keepmtp.checkpoints.dialects.runtime_view import RuntimeView
from keepmtp.checkpoints.sglang.names import sglang_model, sglang_models
from keepmtp.checkpoints.sglang.view import SglangBuild
from keepmtp.quantize.plan.configs import config_of, modules_of
from keepmtp.recipes.errors import KeepMTPError
from keepmtp.recipes.families import find_view
from pages import with_part

NOWHERE = Path("/nonexistent")
WHEEL = Path(os.environ.get("SGLANG_WHEEL", ROOT / "build" / "sglang"))
PEER = ROOT / "tests" / "helpers" / "sglang_peer.py"
PLAIN = {"no config", "None", "UnquantizedLinearMethod", "UnquantizedFusedMoEMethod"}
# Twins of other releases, and a draft with a checkpoint of its own, whose target gives its config a
# part; and those that draft by DSpark, which is not judged.
LEFT_OUT = (
    "dsv4-pro",
    "deepseek-v3.1",
    "glm-4.5-air",
    "gemma-4-26b-assistant",
    "dsv4-flash-0731",
    "dsv4-pro-0813",
    "dsv4.1-flash",
)
# Scheme, MTP block's scheme, dialect.
FORMS = (
    ("NVFP4", "bf16", "compressed-tensors"),
    ("FP8_DYNAMIC", "FP8_DYNAMIC", "compressed-tensors"),
    ("W4A16", "FP8_BLOCK", "compressed-tensors"),
    ("NVFP4", "NVFP4", "modelopt"),
)
# Classes that the stand-ins do not carry, by model and part.
NOT_CONSTRUCTED = {
    tuple(each.split()) for each in table("checkpoints/test_sglang")["NOT_CONSTRUCTED"]
}
# Layers of state-space models are among SGLang's kernels.
UNSEEN = ("mixer.in_proj", "mixer.out_proj")


class Built(NamedTuple):
    """What SGLang builds for a module: `plain`, `raises`, or a scheme in a word; and its own words
    for that.
    """

    word: str
    says: str


class Class(NamedTuple):
    """SGLang's class for a part, with what it builds for each module that it asks its quantization
    config about; without a name where it has none, without modules where nothing constructs it here.
    """

    name: str
    modules: Mapping[str, Built]
    error: str


def ask(questions: Sequence[Mapping[str, Any]]) -> list[Class]:
    """SGLang's answers for a config.json and a part each; skips where there is no wheel."""
    if not (WHEEL / "sglang").is_dir():
        pytest.skip("no unpacked wheel of SGLang in build/sglang")
    words = [sys.executable, PEER, WHEEL]
    done = captured(words, input=json.dumps(questions), timeout=600)
    lines = [line for line in done.stdout.splitlines() if line.startswith("ANSWERS")]
    assert lines, done.stderr[-3000:]
    return [class_of(answer) for answer in json.loads(lines[0].removeprefix("ANSWERS"))]


def class_of(answer: Mapping[str, Any]) -> Class:
    error = answer.get("not_constructed") or answer.get("config_error") or ""
    modules = {
        module["prefix"]: built(*module["answer"])
        for module in answer.get("modules", ())
        if module["class"] not in ("VocabParallelEmbedding", "RadixAttention")
    }
    return Class(answer.get("class", ""), modules, error)


def built(method: str, scheme: str) -> Built:
    if method in PLAIN:
        return Built("plain", method)
    if method.endswith("Error"):
        return Built("raises", f"{method}: {scheme}")
    name = method if scheme == "None" else scheme
    words = {"mxfp4": "mxfp4", "fp4": "nvfp4", "fp8": "fp8", "wna16": "int_packed", "int8": "int8"}
    return Built(next((word for part, word in words.items() if part in name.lower()), name), name)


def built_for(checkpoint: Checkpoint, part: str) -> Iterator[tuple[str, str]]:
    """SGLang's names for the modules of a part, each with what keepmtp says that it builds."""
    view = find_view(checkpoint.config, "model")
    build = SglangBuild(view, quantization_of(checkpoint.config))
    for module in RuntimeView(source=as_source(checkpoint, NOWHERE), view=view).modules:
        for member in module.members:
            if member.place.part == part and build.is_judged(member.place):
                name, answer = build.resolve(member.place)
                form = answer.built.form.removesuffix("_modelopt")
                if answer.error:
                    form = "raises"
                elif form.startswith("fp8"):
                    form = "fp8"
                if name and not name.endswith(UNSEEN) and form != "unknown":
                    yield name, form


def written() -> Iterator[tuple[str, Checkpoint]]:
    """What keepmtp writes for every family in every dialect; combinations that it refuses are left
    out.
    """
    for model in releases.MODELS:
        for scheme, mtp, dialect in FORMS if model not in LEFT_OUT else ():
            try:
                yield model, ours(model, scheme, mtp, format=dialect)
            except KeepMTPError:
                continue
        if "quantization_config" in releases.MODELS[model] and model not in LEFT_OUT:
            yield model, released(model)


def assert_built_alike(checkpoints: list[tuple[str, Checkpoint]]) -> tuple[int, int]:
    """Compare with what SGLang's classes build; returns the numbers of modules and of models."""
    parts = ("backbone", "mtp")
    asked = [{"config": each.config, "part": part} for _, each in checkpoints for part in parts]
    answers = iter(ask(asked))
    agreed, differing, models, unconstructed = 0, [], set(), {}
    for model, checkpoint in checkpoints:
        for part in parts:
            theirs = next(answers)
            if not theirs.modules:
                if theirs.name or theirs.error:
                    unconstructed[model, part] = theirs.error
                continue
            models.add(model)
            for name, form in dict(built_for(checkpoint, part)).items():
                module = theirs.modules.get(name)
                if module is None or module.word != form:
                    differing.append((model, part, name, form, module))
                agreed += 1
    assert unconstructed.keys() <= NOT_CONSTRUCTED, unconstructed
    assert not differing, (len(differing), differing[:12])
    return agreed, len(models)


@pytest.mark.full
def test_each_module_is_built_as_by_sglangs_own_classes():
    agreed, models = assert_built_alike(list(written()))
    assert agreed > 2000 and models >= 24


def test_without_the_added_entries_sglang_raises():
    """The twin: the names that vLLM asks for alone."""
    checkpoint = ours("glm-4.7", "FP8_DYNAMIC", "bf16")
    twin = deepcopy(checkpoint)
    ignore = [entry for entry in twin.quantization["ignore"] if "decoder" not in entry]
    twin.quantization["ignore"] = ignore
    assert_built_alike([("glm-4.7", checkpoint), ("glm-4.7", twin)])
    assert dict(built_for(twin, "mtp"))["model.decoder.self_attn.qkv_proj"] == "raises"


@pytest.mark.full
def test_the_check_finds_what_the_plan_says():
    """Where the plan says that SGLang serves an output, the check finds no error in it, and the
    other way round.
    """
    differing, compared = [], 0
    for format, pairs in sglang_table.PAIRS.items():
        for model in releases.MODELS:
            # Of a backbone with linear attention that SGLang fuses otherwise, it says nothing.
            for pair in pairs[:3:2] if model not in {*LEFT_OUT, "ling-3.0-flash"} else ():
                if (why := sglang_table.obstacle(model, *pair, format)) == sglang_table.REFUSED:
                    continue
                made = as_source(ours(model, *pair, format=format), NOWHERE)
                found = check(made, runtimes=("sglang",)).findings
                compared += 1
                if bool(why) != any(each.severity == "error" for each in found):
                    differing.append((model, format, *pair, why, found[:1]))
    assert not differing and compared > 110, (compared, differing)


@pytest.mark.full
def test_the_page_says_how_many_outputs_resolve_in_both():
    page = sglang_table.DOCS
    assert page.read_text() == with_part(page, sglang_table.text()), "run `make docs`"


def test_an_entry_that_would_exclude_the_backbone_in_vllm_is_an_obstacle():
    """MiMo's draft has no prefix in SGLang, and vLLM takes an entry for a substring."""
    fit = config_of(planned("mimo-7b", "NVFP4", "bf16", format="modelopt"))
    assert "would exclude model.layers.0" in fit.line


@pytest.mark.parametrize(
    ("model", "scheme", "says"),
    [
        ("qwen3-next-80b", "FP8_DYNAMIC", "it asks for model.layers.0.mlp.experts.0"),
        ("exaone-4.5-33b", "FP8_DYNAMIC", "it has no class for the model"),
        ("minimax-m3", "FP8_DYNAMIC", "no draft class (models/minimax_m3_vl.py)"),
        ("deepseek-r1", "FP8_BLOCK", "kv_b_proj"),
        ("dsv4-flash", "FP8_DYNAMIC", "wo_a"),
    ],
)
def test_an_obstacle_is_named_with_sglangs_file(model, scheme, says):
    plan = planned(model, scheme, "bf16")
    config = config_of(plan)
    assert (says in config.line and ".py)" in config.line) or "(models)" in config.line
    asked = set[str]()
    for module in runtime_modules(modules_of(plan)):
        asked.update((module.name, *module.asked))
    entries = [*config.value["ignore"]]
    for group in config.value["config_groups"].values():
        entries += group["targets"]
    for module in modules_of(plan):
        for name in {*sglang_table.names(plan.view, module.place)} - asked:
            assert not any(re.match(entry[3:], name) for entry in entries), "an entry for SGLang"


def test_every_release_has_an_entry_and_without_a_draft_a_reason():
    for model, config in releases.MODELS.items():
        assert config["architectures"][0] in sglang_models(), model
    assert sglang_model({"architectures": ["NoneForCausalLM"]}).no_draft
    for architecture, model in sglang_models().items():
        assert (model.draft is None) == bool(model.no_draft), architecture
