"""`check --runtime sglang` against SGLang's own classes, and a twin for each of its rules."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import releases
import sglang_classes
import sglang_table
from checkpoint_files import Checkpoint, as_source, write
from commands import keepmtp, ran, refused
from data_files import table
from good import ours, released
from keepmtp.checkpoints.dialects.runtime_view import Module, RuntimeView
from keepmtp.recipes.errors import KeepMTPError
from keepmtp.recipes.families import find_view
from keepmtp.validate.check.check import check
from keepmtp.validate.check.sglang.view import SglangView
from keepmtp.validate.facts.findings import Finding

NOWHERE = Path("/nonexistent")
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
    ("W4A16", "FP8_BLOCK", "compressed-tensors"),
    ("NVFP4", "NVFP4", "modelopt"),
)
# Classes that the stand-ins do not carry, by model and part.
NOT_CONSTRUCTED = {
    tuple(each.split()) for each in table("validate/check/test_sglang")["NOT_CONSTRUCTED"]
}
# Layers of state-space models are among SGLang's kernels.
UNSEEN = ("mixer.in_proj", "mixer.out_proj")


def view_of(checkpoint: Checkpoint) -> SglangView:
    source = as_source(checkpoint, NOWHERE)
    return SglangView(RuntimeView(source=source, view=find_view(checkpoint.config, "model")))


def findings(checkpoint: Checkpoint) -> tuple[Finding, ...]:
    return check(as_source(checkpoint, NOWHERE), runtimes=("sglang",)).findings


def word(module: Module) -> str:
    if module.resolution.error:
        return "raises"
    form = module.resolution.built.form
    return {"nvfp4_modelopt": "nvfp4"}.get(form, "fp8" if form.startswith("fp8") else form)


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


@pytest.mark.full
def test_each_module_is_built_as_by_sglangs_own_classes():
    checkpoints = list(written())
    parts = ("backbone", "mtp")
    asked = [
        sglang_classes.Question(each.config, part) for _, each in checkpoints for part in parts
    ]
    answers = iter(sglang_classes.ask(asked))
    agreed, differing, families, unconstructed = 0, [], set(), {}
    for model, checkpoint in checkpoints:
        view = view_of(checkpoint)
        for part in parts:
            theirs = next(answers)
            mine = {
                each.name: each
                for each in view.modules
                if each.part == part and each.loads_quantized
            }
            if not theirs.modules:
                if theirs.name or theirs.error:
                    unconstructed[model, part] = theirs.error
                continue
            families.add(view.runtime.view.family.model_type)
            for name, module in mine.items():
                if name.endswith(UNSEEN) or word(module) == "unknown":
                    continue
                built = theirs.modules.get(name)
                if built is None or built.word != word(module):
                    differing.append((model, part, name, word(module), built))
                agreed += 1
    assert unconstructed.keys() <= NOT_CONSTRUCTED, unconstructed
    assert not differing, (len(differing), differing[:12])
    assert agreed > 1550 and len(families) >= 24


@pytest.mark.full
def test_the_command_names_the_server(tmp_path):
    folder = write(tmp_path / "checkpoint", ours("glm-4.7", "NVFP4", "NVFP4", format="modelopt"))
    (line,) = ran(f"check {folder} --runtime sglang --json", status=1).splitlines()
    printed = json.loads(line)
    assert not printed["ok"]
    assert {finding["runtime"] for finding in printed["findings"]} == {"sglang"}
    assert printed["runtimes"] == ["sglang"]
    both = keepmtp(f"check {folder} --runtime vllm --runtime sglang")
    assert both.stdout.rstrip().endswith("; judged for vLLM 0.33.0, SGLang 0.5.23 (not run)")
    assert "judged for" not in ran(f"check {folder}"), "vLLM takes it"
    refused(f"check {folder} --runtime tgi", says="--runtime: must be one of vllm, sglang")


# Of a backbone with linear attention that SGLang fuses otherwise, the check says nothing.
NOT_JUDGED = {"ling-3.0-flash"}


@pytest.mark.full
def test_the_check_finds_what_the_plan_says():
    """Where the plan says that SGLang serves an output, the check finds no error in it, and the
    other way round.
    """
    differing, compared = [], 0
    for format, pairs in sglang_table.PAIRS.items():
        for model in releases.MODELS:
            for pair in pairs[:3:2] if model not in {*LEFT_OUT, *NOT_JUDGED} else ():
                if (why := sglang_table.obstacle(model, *pair, format)) == sglang_table.REFUSED:
                    continue
                found = findings(ours(model, *pair, format=format))
                errors = [each for each in found if each.severity == "error"]
                compared += 1
                if bool(why) != bool(errors):
                    differing.append((model, format, *pair, why, errors[:1]))
    assert not differing and compared > 110, (compared, differing)
