"""The tensor-parallel sizes that a plan names are those at which vLLM loads what it writes; and each
command of the pages loads, at its true widths, where the page says that it runs.
"""

from pathlib import Path

import pytest
import releases
from checkpoint_files import write
from good import outputs_of, plan_of, plan_of_recipe
from keepmtp.quantize.plan.plan import Plan
from keepmtp.recipes.frozen import Json
from keepmtp.recipes.tensor_parallel import SIZES, Split, why_not
from keepmtp.validate.dryload.check_on import check_on
from keepmtp.validate.dryload.loader import DryLoader, Job
from keepmtp.validate.facts.vllm_env import find_vllm
from readme import COMMANDS

pytestmark = pytest.mark.vllm
RECIPES = (
    "glm-4.5-air.w4a16-gptq",  # its experts are 11 groups wide
    "qwen3-next-80b.w4a16-fp8",
    "deepseek-v3.1",
    "dsv4-flash.w4a16-fp8",
    "mimo-v2-flash",
    "ernie-4.5-21b",
    "qwen3.5-397b",
    "glm-4.7-flash",
)
SCHEMES = ("W4A16", "W4A16_G32", "FP8_BLOCK", "NVFP4A16")


def disagreements(plan: Plan, loader: DryLoader, folder: Path) -> Json:
    """By size, and with whole experts on a rank or not: why the plan refuses, and why vLLM."""
    write(folder, outputs_of(plan))
    ways = [Split(size, whole) for size in SIZES for whole in (False, True)]
    jobs = [Job(folder=folder, tp=size, whole_experts=whole) for size, whole in ways]
    wrong = {}
    for way, account in zip(ways, loader._load_ranks(jobs), strict=True):
        refused = why_not(plan.view.text_config, plan.cuts, way)
        if (refused is None) != (account.load.failure is None):
            wrong[way] = refused, account.load.failure
    return wrong


@pytest.mark.parametrize(
    "name",
    ["glm-4.7.w4a16-fp8", *[pytest.param(name, marks=pytest.mark.full) for name in RECIPES]],
)
def test_a_plan_knows_the_sizes_at_which_vllm_loads(name, dry_loader, tmp_path):
    assert disagreements(plan_of_recipe(name, "thin"), dry_loader("sm90"), tmp_path / "made") == {}


@pytest.mark.full
@pytest.mark.few(1, 5)  # each scheme, and each model with two of them
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("model", ["glm-4.7", "qwen3-next-80b"])
def test_one_scheme_for_all(model, scheme, dry_loader, tmp_path):
    """Shared experts have groups too, and expert parallelism cuts them all the same."""
    plan = plan_of(*releases.thin_layout(model, num_experts=16), model, scheme, "bf16")
    assert disagreements(plan, dry_loader("sm90"), tmp_path / "made") == {}


@pytest.mark.full
@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_a_command_of_the_pages_loads_where_it_says(command, dry_loader, tmp_path):
    folder = write(tmp_path / "made", outputs_of(plan_of_recipe(command.recipe, "thin")))
    place = {"vllms": [find_vllm()], "gpus": [command.gpu], "splits": [Split(command.tp)]}
    (checked,) = check_on([str(folder)], **place)
    assert checked.data.ok, checked.data.findings
