"""Checkpoints next to each other: every byte has a group, other models are refused, figures of
reports are shown with their intervals.
"""

import re
import shutil
import sys

import evaluations
import pytest
import releases
import reports
from checkpoint_files import write
from commands import captured
from good import ours
from good_checkpoints import GOOD
from keepmtp import api
from keepmtp.checkpoints.identity import identify
from keepmtp.checkpoints.safetensors_file import total_bytes
from keepmtp.checkpoints.source import open_source
from keepmtp.recipes.errors import KeepMTPError
from keepmtp.validate.facts.results import report_folder
from keepmtp.validate.report.comparison import notes, sections
from keepmtp.validate.report.report import write as write_report
from stations import bench_fact, closeness

CASES = """v3 native bf16 mtp, dsv4 nvfp4 experts, glm nvfp4, glm gptq, next awq, glm quark,
qwen vl autoround, qwen vl moe nvfp4, glm autoround mxfp4, mimo w4a16, glm modelopt file, next mixed,
glm mixed blocks, released qwen3.5-397b"""


def cells(found, heading):
    """The rows of a table by their names; {} where there is no such table."""
    for title, table in sections(found):
        if title.startswith(heading):
            return {name: row for name, *row in table.rows}
    return {}


@pytest.mark.few(4)
@pytest.mark.parametrize("name", re.split(r",\s", CASES))
def test_the_bytes_of_the_groups_are_those_of_the_files(name, tmp_path):
    made = GOOD[name]()
    made.elsewhere["model.layers.9.extra.weight"] = ("BF16", (3, 5))
    folder = write(tmp_path / "checkpoint", made)
    (one,) = api.compare([folder]).checkpoints
    source = open_source(folder)
    every = (*source.entries.values(), *source.unindexed.values())
    assert sum(sum(group.values()) for group in one.stored.values()) == total_bytes(every)
    held = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert total_bytes(every) < held and len(source.unindexed) == 1
    assert one.facts.num_bytes + 30 == total_bytes(every)
    assert set(one.verdicts.values()) <= {""}


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("name", "group", "stored"),
    [
        ("glm nvfp4", "experts", {"NVFP4"}),
        ("glm nvfp4", "MTP block", {"NVFP4A16", "BF16", "F32"}),
        ("glm gptq", "experts", {"gptq"}),
        ("next awq", "attention", {"awq"}),
        ("glm autoround mxfp4", "experts", {"mxfp4"}),
        ("v3 native bf16 mtp", "experts", {"fp8_block"}),
        ("glm mixed", "experts", {"FP8"}),
        ("mimo w4a16", "dense_mlp", {"W4A16"}),
        ("glm w4a16", "head", {"BF16"}),
    ],
)
def test_a_group_is_named_by_scheme_or_form(name, group, stored, tmp_path):
    (one,) = api.compare([write(tmp_path / "checkpoint", GOOD[name]())]).checkpoints
    assert one.stored[group].keys() == stored


def test_the_cache_and_the_layers_of_a_checkpoint(tmp_path):
    names = ["glm modelopt file", "glm gptq", "glm nvfp4"]
    folders = [write(tmp_path / name.replace(" ", "-"), GOOD[name]()) for name in names]
    rows = cells(api.compare(folders), "What each is")
    assert rows["KV cache"] == ["not quantized"] * 3
    assert rows["MTP layers"] == ["1", "1", "1"] and rows["vLLM 0.33.0"] == ["loads"] * 3


def test_a_version_that_does_not_load_it_is_named_with_the_reason(tmp_path):
    broken = GOOD["glm nvfp4"]()
    broken.take(r"model\.layers\.\d+\.eh_proj\.weight")
    folders = [
        write(tmp_path / "good", GOOD["glm nvfp4"]()),
        write(tmp_path / "broken", broken),
    ]
    found = api.compare(folders)
    assert cells(found, "What each is")["vLLM 0.32.0"] == ["loads", "no"]
    assert any("2 in vLLM 0.32.0: " in note and "eh_proj" in note for note in notes(found))


def test_a_method_that_no_vllm_has_is_shown_with_its_bytes(tmp_path):
    foreign = GOOD["glm nvfp4"]()
    foreign.config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    found = api.compare([write(tmp_path / "foreign", foreign)])
    rows = cells(found, "What each is")
    assert rows["vLLM 0.33.0"] == ["no"] and rows["dialect"] == ["bitsandbytes"]
    assert cells(found, "Bytes")["experts"][0].endswith(" nvfp4")


@pytest.mark.parametrize(
    ("model", "change", "says"),
    [
        ("qwen3-next-80b", None, "whose family is glm4_moe; got qwen3_next"),
        ("glm-4.7", ("num_hidden_layers", 6), "whose num_hidden_layers is 3; got 6"),
        ("glm-4.7", ("moe_intermediate_size", 256), r"whose moe_intermediate_size is \d+; got 256"),
    ],
)
def test_another_model_or_width_is_refused(model, change, says, tmp_path):
    write(tmp_path / "a", GOOD["glm fp8"]())
    changes = dict([change]) if change else {}
    config, tensors = releases.source_layout(model, changes=changes)
    releases.write_checkpoint(tmp_path / "b", config, tensors)
    with pytest.raises(KeepMTPError, match="must be of the model of") as refused:
        api.compare([tmp_path / "a", tmp_path / "b"])
    assert re.search(says, str(refused.value)), refused.value


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A checkpoint with a report of its bytes, and the same one without."""
    parent = tmp_path_factory.mktemp("measured")
    for name in ("with", "without"):
        shutil.copytree(reports.MODEL, parent / name)
    folder = report_folder(parent / "with")
    folder.mkdir()
    facts = {
        "serve": reports.served(is_copy=False),
        "bench": bench_fact(),
        "closeness": closeness(folder),
        "evaluation": evaluations.evaluation(),
    }
    identity = identify(parent / "with", cache=folder)
    write_report(folder, reports.judged(identity=identity, **facts))
    return parent


def test_measured_figures_have_their_intervals(measured):
    found = api.compare([measured / "with", measured / "without"])
    rows = cells(found, "What was measured")
    assert all(row[1] == "-" for row in rows.values()), "nothing was measured on the other"
    words = {name: row[0] for name, row in rows.items()}
    assert words["gsm8k, strict-match, 1,319 questions"] == "68.92 % ± 1.27"
    accepted = words["accepted, k=3, gsm8k"]
    assert accepted == "79.33 % (78.93 to 79.73) of 120,000, length 3.38"
    assert words["gates"] == "pass" and words["served"] == "native"
    divergence = words["divergence from the source, 4,000 tokens"]
    assert divergence == "at least 0.01 ± 0.00023 nats a token"
    assert words["the most likely token differs, 4,000 tokens"] == "1.98 % (1.57 to 2.46)"
    assert words["tokens a second, 1 at once, k=3"] == "193.0 ± 3.9"
    for one in found.checkpoints:  # machines get the report itself
        read = type(one).model_validate_json(one.model_dump_json())
        assert read.report == one.report and (read.report is None) == (one.path[-7:] == "without")


def test_a_report_of_other_bytes_does_not_count(measured, tmp_path):
    for name in ("with", "with.report"):
        shutil.copytree(measured / name, tmp_path / name)
    path = tmp_path / "with" / "config.json"
    path.write_text(path.read_text() + "\n")
    found = api.compare([tmp_path / "with"])
    assert cells(found, "What was measured") == {}
    says = "1 has no figures of servers: with.report is not known to be of these bytes."
    assert says in [*notes(found)]


# Prints the peak of memory, MiB, after a comparison.
AT_FULL_SIZE = """
import re, sys
from pathlib import Path
from keepmtp import api
found = api.compare(sys.argv[1:])
for one in found.checkpoints:
    print(one.facts.num_tensors, *sorted(one.stored), sep=", ")
print(int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) >> 10)
"""


@pytest.mark.full
def test_a_full_size_checkpoint_of_holes_takes_less_than_a_gib(tmp_path):
    """671 billion weights: 136,247 tensors in W4A16, 91,215 in MXFP4."""
    for scheme in ("W4A16", "MXFP4"):
        made = ours("deepseek-r1", scheme, size="full")
        releases.write_checkpoint(tmp_path / scheme, made.config, made.tensors, num_shards=None)
    places = (tmp_path / "W4A16", tmp_path / "MXFP4")
    said = captured([sys.executable, "-c", AT_FULL_SIZE, *map(str, places)], status=0).stdout
    *lines, peak = said.splitlines()
    groups = "MTP block, attention, dense_mlp, embedding, experts, head, rest, shared_experts"
    assert lines == [f"136247, {groups}", f"91215, {groups}"]
    assert int(peak) < 1024


def test_without_a_release_no_torch_is_needed(tmp_path):
    folder = write(tmp_path / "checkpoint", GOOD["glm nvfp4"]())
    code = "import sys; from keepmtp import api; api.compare(sys.argv[1:]); print(*sys.modules)"
    done = captured([sys.executable, "-c", code, str(folder)], status=0)
    assert not {"torch", "numpy", "matplotlib"} & {*done.stdout.split()}
