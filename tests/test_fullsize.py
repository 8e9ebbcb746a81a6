"""Released models at their real size, from headers over holes: what a plan of one decides, costs and weighs.

The files are sparse: 807 GB of Qwen3.5 take a few megabytes of disk. Numbers are exact on purpose, so that a change to
a table, a scheme or a recipe shows which tensors it moves.
"""

import json
import resource
import subprocess
import sys
from collections import Counter
from pathlib import Path

import checkpoints
import pytest
from keepmtp.quantize.plan import Plan, make_plan
from keepmtp.quantize.source import open_source
from keepmtp.recipes.schema import find_recipe

# recipe: (tensors in, tensors out, bytes out, what a published sibling takes in GB and where that figure is from)
FULL_SIZE = {
    # canada-quant/DeepSeek-V4-Flash-NVFP4-FP8-MTP: the same 134,309 names, 181 GB.
    "dsv4-flash.nvfp4-fp8": (69187, 134309, 181_225_446_056, 181),
    # Weight-only 4-bit DeepSeek-V3 repositories: 340 to 380 GB; here attention and the MTP block are FP8 as released.
    "deepseek-v3.1.w4a16-fp8": (91991, 136535, 0, 372),
    # NVFP4 repositories of GLM-4.5 to 4.7: 200 to 220 GB.
    "glm-4.7.nvfp4a16-fp8": (44691, 130775, 0, 218),
    # nvidia/Qwen3.5-397B-A17B-NVFP4: 230 to 250 GB.
    "qwen3.5-397b.nvfp4a16-fp8": (2924, 279524, 0, 249),
}
SOURCE_GB = {"dsv4-flash": 160, "deepseek-v3.1": 689, "glm-4.7": 717, "qwen3.5-397b": 807}


@pytest.fixture(scope="module", params=FULL_SIZE)
def plan(request, tmp_path_factory) -> Plan:
    recipe, _ = find_recipe(request.param)
    folder = tmp_path_factory.mktemp(recipe.model)
    config, tensors = checkpoints.source_layout(recipe.model, size="full")
    checkpoints.write_checkpoint(folder, config, tensors, num_shards=None)
    return make_plan(recipe, open_source(folder))


def test_fixture_is_as_large_as_the_release_and_takes_no_disk(plan):
    files = [path.stat() for path in plan.source.folder.iterdir()]
    assert sum(file.st_size for file in files) / 1e9 == pytest.approx(SOURCE_GB[plan.recipe.model], rel=0.01)
    assert sum(file.st_blocks * 512 for file in files) < 60e6
    assert all(entry.num_bytes < 5e9 for entry in plan.entries.values() if not entry.name.endswith("_proj"))


def test_counts_and_bytes(plan):
    tensors_in, tensors_out, bytes_out, published_gb = FULL_SIZE[plan.recipe.name]
    assert len(plan.entries) == tensors_in
    assert sum(len(tensor.outputs) for tensor in plan.tensors) == tensors_out
    assert plan.num_bytes_after == bytes_out
    assert bytes_out / 1e9 == pytest.approx(published_gb, rel=0.01)


def test_every_source_tensor_is_consumed_once(plan):
    consumed = Counter(name for tensor in plan.tensors if tensor.fate != "add" for name in tensor.inputs)
    assert set(consumed) == set(plan.entries)
    assert set(consumed.values()) == {1}
    assert plan.num_bytes_before == sum(entry.num_bytes for entry in plan.entries.values())


def test_every_output_is_written_once(plan):
    planned = Counter(output.name for tensor in plan.tensors for output in tensor.outputs)
    assert set(planned.values()) == {1}
    sharded = Counter(output.name for shard in plan.shards for output in shard.outputs)
    assert sharded == planned


def test_shards_keep_to_their_size(plan):
    largest_unit = max(sum(o.num_bytes for tensor in unit for o in tensor.outputs) for unit in plan.units)
    for shard in plan.shards:
        assert sum(output.num_bytes for output in shard.outputs) <= max(plan.shard_bytes, largest_unit)


def test_only_the_mtp_block_and_what_is_kept_stay_plain(plan):
    """The reason of every matrix that is not quantized is in the plan, and in the recipe or the family's table."""
    for tensor in plan.tensors:
        if len(tensor.shape) == 2 and not tensor.scheme and tensor.part == "backbone":
            assert tensor.reason, tensor.name
            assert plan.recipe.backbone.get(tensor.role, "bf16") == "bf16", tensor.name
    experts = {(t.part, t.scheme) for t in plan.tensors if t.role == "experts"}
    assert ("backbone", plan.recipe.backbone["experts"]) in experts and len(experts) == 2


def test_what_deepseek_v4_lacks_is_added(plan):
    added = {tensor.name: tensor.inputs for tensor in plan.tensors if tensor.fate == "add"}
    if plan.recipe.family == "deepseek_v4":
        assert added == {"mtp.0.emb.tok_emb.weight": ("embed.weight",), "mtp.0.head.weight": ("head.weight",)}
    else:
        assert added == {}


MEASURED = """
import json, resource, sys, time
from keepmtp.quantize.plan import make_plan
from keepmtp.quantize.source import open_source
from keepmtp.recipes.schema import find_recipe
start = time.process_time()
plan = make_plan(find_recipe(sys.argv[1])[0], open_source(sys.argv[2]))
seconds = time.process_time() - start
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
heavy = sorted({"torch", "transformers", "numpy"} & set(sys.modules))
print(json.dumps({"seconds": seconds, "peak_kib": peak, "tensors": len(plan.tensors), "heavy": heavy}))
"""


def test_planning_takes_seconds_and_little_memory(plan):
    """In a process of its own, as `keepmtp plan` runs: from files to plan, without torch."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, plan.recipe.name, str(plan.source.folder)],
        capture_output=True, text=True, check=True, cwd=Path(__file__).parent,
    )  # fmt: skip
    measured = json.loads(done.stdout)
    assert measured["tensors"] == len(plan.tensors)
    assert measured["heavy"] == []
    assert measured["seconds"] < 30, "processor time; 3 to 5 s on an idle core"
    assert measured["peak_kib"] < 600 * 1024
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > 0
