"""Released models at their real size, from headers over holes: what a plan of one decides, costs
and weighs.

The files are sparse: 807 GB of Qwen3.5 take a few megabytes of disk. Numbers are exact on purpose,
so that a change to a table, a scheme or a recipe shows which tensors it moves.
"""

import json
import sys
from collections import Counter
from itertools import chain
from pathlib import Path

import pytest
import releases
from checked import check
from commands import captured
from data_files import table
from keepmtp.checkpoints.safetensors_file import total_bytes
from keepmtp.checkpoints.source import open_source
from keepmtp.quantize.plan.configs import files_of
from keepmtp.quantize.plan.plan import Plan, make_plan
from keepmtp.quantize.plan.tensor_plan import outputs_of
from keepmtp.recipes.find import find_recipe

FULL_SIZE = table("quantize/plan/test_fullsize")["FULL_SIZE"]


@pytest.fixture(scope="module", params=FULL_SIZE)
def plan(request, tmp_path_factory) -> Plan:
    recipe, _ = find_recipe(request.param)
    folder = tmp_path_factory.mktemp(recipe.model)
    config, tensors = releases.source_layout(recipe.model, size="full")
    releases.write_checkpoint(folder, config, tensors, num_shards=None)
    return make_plan(recipe, open_source(folder))


@pytest.mark.few(1)
def test_each_tensor_is_read_once_and_written_once(plan):
    num_in, num_out, bytes_out, *_ = FULL_SIZE[plan.recipe.name]
    read = Counter[str]()
    for tensor in plan.tensors:
        if tensor.fate != "add":
            read.update(tensor.inputs)
    planned = Counter(output.name for output in outputs_of(plan.tensors))
    written = Counter[str]()
    for shard in plan.shards:
        written.update(output.name for output in shard.outputs)
    assert read == Counter(plan.entries.keys()) and len(read) == num_in
    assert written == planned and set(written.values()) == {1} and len(written) == num_out
    assert plan.num_bytes_before == total_bytes(plan.entries.values())
    assert plan.num_bytes_after == bytes_out


@pytest.mark.few(1)
def test_a_draft_has_files_of_its_own(plan):
    """What must be opened for the draft alone: sglang #35395 opened all 47 files of a checkpoint
    for 3.
    """
    *_, num_all, num_mtp = FULL_SIZE[plan.recipe.name]
    parts = []
    shared = set()
    for number, shard in enumerate(plan.shards):
        tensors = [*chain(*shard.units)]
        parts.append({tensor.part for tensor in tensors})
        for tensor in tensors:
            if tensor.part == "backbone" and tensor.role in ("embedding", "head"):
                shared.add(number)
    assert parts == [{"backbone"}] * (num_all - num_mtp) + [{"mtp"}] * num_mtp
    assert shared == {0}, "the embedding and the head that both use are in one file"


@pytest.mark.few(1)
def test_release_and_result_check_green(plan, tmp_path):
    """The static check on the release as it is, and on what the plan will write, headers over
    holes.
    """
    tensors = {name: (dtype, shape) for name, dtype, shape in outputs_of(plan.tensors)}
    config = files_of(plan)["config.json"]
    out = releases.write_checkpoint(tmp_path / "out", config, tensors, num_shards=None)
    for report in (check(plan.source.folder), check(out, source=plan.source)):
        assert not report.findings, report.findings[:3]
        assert report.facts.num_mtp_layers == 1
    assert report.facts.num_tensors == FULL_SIZE[plan.recipe.name][1]


@pytest.mark.few(2)
def test_what_deepseek_v4_lacks_is_added(plan):
    added = {tensor.name: tensor.inputs for tensor in plan.tensors if tensor.fate == "add"}
    expected = {}
    if plan.recipe.family == "deepseek_v4":
        expected["mtp.0.emb.tok_emb.weight"] = ("embed.weight",)
        expected["mtp.0.head.weight"] = ("head.weight",)
    assert added == expected


MEASURED = """
import json, re, sys
from pathlib import Path
from keepmtp.quantize.plan.plan import make_plan
from keepmtp.checkpoints.source import open_source
from keepmtp.recipes.find import find_recipe
plan = make_plan(find_recipe(sys.argv[1])[0], open_source(sys.argv[2]))
peak = int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])  # ru_maxrss counts the parent's
heavy = sorted({"torch", "transformers", "numpy"} & set(sys.modules))
print(json.dumps({"peak_kib": peak, "tensors": len(plan.tensors), "heavy": heavy}))
"""


@pytest.mark.full
@pytest.mark.parametrize("plan", ["dsv4-flash.nvfp4-fp8"], indirect=True)
def test_planning_takes_little_memory(plan):
    """In a process of its own, as `keepmtp plan` runs: from files to plan, without torch. Seconds:
    benchmarks/.
    """
    done = captured(
        [sys.executable, "-c", MEASURED, plan.recipe.name, str(plan.source.folder)],
        check=True,
        cwd=Path(__file__).parents[2] / "helpers",
    )
    measured = json.loads(done.stdout)
    assert measured["tensors"] == len(plan.tensors)
    assert measured["heavy"] == []
    assert measured["peak_kib"] < 300 * 1024
