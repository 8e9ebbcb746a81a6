"""One group of a finished checkpoint, in vLLM's own classes: target and draft are filled."""

from functools import partial

import pytest
from checkpoint_files import Checkpoint, write
from good import integers, ours, outputs_of, qwen_fp8
from keepmtp.pipeline import plan_for
from keepmtp.recipes.conventions import FORMATS
from keepmtp.validate.check.check import examine
from keepmtp.validate.dryload.check_on import with_loads

pytestmark = pytest.mark.vllm
MODELS = ("glm-4.7", "qwen3.5-27b", "mimo-7b", "deepseek-v3.1")
CHANGES = ("mtp=NVFP4A16", "mtp=FP8_BLOCK", "attention=FP8_DYNAMIC")
# Bodies that no recipe has a word for.
OTHERS = {
    "native FP8": (qwen_fp8, "mtp=bf16"),
    "W4 in groups of 64": (partial(integers, "qwen3.5-27b", columns=64), "mtp=FP8_DYNAMIC"),
    "W4 of experts": (partial(integers, "glm-4.7", columns=64), "mtp=FP8_DYNAMIC"),
    "W4 with zero points": (
        partial(integers, "qwen3.5-27b", columns=32, has_zeros=True),
        "mtp=NVFP4A16",
    ),
}


@pytest.fixture(scope="module")
def accounts(dry_loaded, tmp_path_factory):
    home = tmp_path_factory.mktemp("finished")
    made = dict[str, Checkpoint]()
    for model in MODELS:
        for format in FORMATS:
            folder = write(home / f"{model}-{format}", ours(model, "NVFP4A16", format=format))
            for change in CHANGES:
                plan, _ = plan_for(str(folder), changes=[change], requantize=True)
                made[f"{model} {format} {change}"] = outputs_of(plan)
    for name, (make, change) in OTHERS.items():
        plan, _ = plan_for(str(write(home / name, make())), changes=[change])
        made[name] = outputs_of(plan)
    # Three changes for each, an odd number: every change is on either GPU.
    return [
        dry_loaded({name: made[name] for name in [*made][start::2]}, gpu)
        for start, gpu in enumerate(("sm90", "sm100"))
    ]


@pytest.mark.full
def test_every_case_loads(accounts):
    assert sum(map(len, accounts)) == len(MODELS) * len(FORMATS) * len(CHANGES) + len(OTHERS)
    for loads in accounts:
        for name, account in loads.items():
            checked = with_loads(examine(account.path), [account])
            assert checked.data.ok, (name, checked.data.findings)
