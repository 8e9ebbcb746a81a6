"""Groups of three builds put together, in vLLM's own classes: target and draft are filled."""

import pytest
from checkpoint_files import write
from good import MODELS, builds, changes, outputs_of
from keepmtp.pipeline import plan_for
from keepmtp.recipes.conventions import FORMATS
from keepmtp.validate.dryload.check_on import check_on
from keepmtp.validate.dryload.versions import had_vllms
from keepmtp.validate.facts.vllm_env import find_vllm

pytestmark = [pytest.mark.vllm, pytest.mark.full]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> list[str]:
    """Each family in each dialect."""
    home = tmp_path_factory.mktemp("donors")
    made = []
    for model in MODELS:
        for format in FORMATS:
            first, *others = builds(home / f"{model}-{format}", model, format)
            plan, _ = plan_for(str(first), changes=changes(model, *others))
            made.append(str(write(home / f"{model}-{format}-merged", outputs_of(plan))))
    return made


@pytest.mark.parametrize("version", ["0.32.0", "0.33.0"])
def test_every_case_loads(version, folders):
    vllms, _ = had_vllms([version], find_vllm())
    for checked in check_on(folders, vllms=vllms, gpus=("sm100",)):
        assert checked.accounts and checked.data.ok, checked.data.findings
