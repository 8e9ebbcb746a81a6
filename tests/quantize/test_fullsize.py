"""Released models at their real size, from headers over holes: what a plan of one decides, costs
and weighs.

The files are sparse: 807 GB of Qwen3.5 take a few megabytes of disk. Numbers are exact on purpose,
so that a change to a table, a scheme or a recipe shows which tensors it moves.
"""

import json
import sys
from collections import Counter
from pathlib import Path

import pytest
import releases
from commands import captured
from keepmtp.checkpoints.source import open_source
from keepmtp.quantize.plan.configs import files_of
from keepmtp.quantize.plan.plan import Plan, make_plan
from keepmtp.recipes.find import find_recipe
from keepmtp.validate.check.check import check
from tables import table

FULL_SIZE = table("quantize/test_fullsize")["FULL_SIZE"]


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
    read, planned = Counter(), Counter()
    for tensor in plan.tensors:
        planned.update(output.name for output in tensor.outputs)
        if tensor.fate != "add":
            read.update(tensor.inputs)
    written = Counter(output.name for shard in plan.shards for output in shard.outputs)
    assert read == Counter(plan.entries.keys()) and len(read) == num_in
    assert written == planned and set(written.values()) == {1} and len(written) == num_out
    assert plan.num_bytes_before == sum(entry.num_bytes for entry in plan.entries.values())
    assert plan.num_bytes_after == bytes_out


@pytest.mark.few(1)
def test_a_draft_has_files_of_its_own(plan):
    """What must be opened for the draft alone: sglang #35395 opened all 47 files of a checkpoint
    for 3.
    """
    files = [[tensor for unit in shard.units for tensor in unit] for shard in plan.shards]
    parts = [{tensor.part for tensor in file} for file in files]
    *_, num_all, num_mtp = FULL_SIZE[plan.recipe.name]
    assert parts == [{"backbone"}] * (num_all - num_mtp) + [{"mtp"}] * num_mtp
    roles = [{tensor.role for tensor in file} for file in files[: num_all - num_mtp]]
    held = [number for number, own in enumerate(roles) if own & {"embedding", "head"}]
    assert held == [0], "the embedding and the head that both use are in one file"


@pytest.mark.few(1)
def test_release_and_result_check_green(plan, tmp_path):
    """The static check on the release as it is, and on what the plan will write, headers over
    holes.
    """
    tensors = {o.name: (o.dtype, o.shape) for tensor in plan.tensors for o in tensor.outputs}
    config = files_of(plan)["config.json"]
    out = releases.write_checkpoint(tmp_path / "out", config, tensors, num_shards=None)
    for report in (check(plan.source.folder), check(out, source=plan.source)):
        assert not report.findings, report.findings[:3]
        assert report.facts.num_mtp_layers == 1
    assert report.facts.num_tensors == FULL_SIZE[plan.recipe.name][1]


def test_what_deepseek_v4_lacks_is_added(plan):
    shared = {"emb.tok_emb": "embed", "head": "head"}
    expected = {f"mtp.0.{name}.weight": (f"{of}.weight",) for name, of in shared.items()}
    added = {tensor.name: tensor.inputs for tensor in plan.tensors if tensor.fate == "add"}
    assert added == (expected if plan.recipe.family == "deepseek_v4" else {})


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
        cwd=Path(__file__).parent.parent / "helpers",
    )
    measured = json.loads(done.stdout)
    assert measured["tensors"] == len(plan.tensors)
    assert measured["heavy"] == []
    assert measured["peak_kib"] < 300 * 1024
