"""Models that never had an MTP block: vLLM's own classes load them without a draft, and agree with
the static check.
"""

import pytest
from broken import WITHOUT_MTP
from checkpoint_files import write
from keepmtp.validate.dryload.check_on import check_on
from keepmtp.validate.facts.results import CheckData
from keepmtp.validate.facts.vllm_env import find_vllm
from without_mtp import SAID, llama

pytestmark = pytest.mark.vllm
GOOD = {
    f"{tool or 'plain'}{' experts' * experts}": (tool, experts)
    for tool in ("", *SAID)
    for experts in (False, True)
}


@pytest.fixture(scope="module")
def judged(tmp_path_factory) -> dict[str, CheckData]:
    place = tmp_path_factory.mktemp("without")
    made = {name: llama(tool, experts=experts) for name, (tool, experts) in GOOD.items()}
    made |= {case.name: case.build() for case in WITHOUT_MTP}
    folders = [write(place / str(number), each) for number, each in enumerate(made.values())]
    found = check_on([str(folder) for folder in folders], vllm=find_vllm(), gpus=["sm100"])
    return {name: checked.data for name, checked in zip(made, found, strict=True)}


@pytest.mark.parametrize("name", GOOD)
def test_a_good_one_is_loaded_without_a_draft(name, judged):
    data = judged[name]
    assert [finding.rule for finding in data.findings] == ["family"], data.findings
    (load,) = data.dry
    assert load.ok and load.k == 0 and load.draft.cls == ""
    assert load.target.num_written == load.target.num_params > 30


@pytest.mark.parametrize("name", [case.name for case in WITHOUT_MTP])
def test_vllm_agrees_that_a_broken_one_is_broken(name, judged):
    errors = {finding.origin for finding in judged[name].findings if finding.severity == "error"}
    assert errors == {"static", "dry"}, judged[name].findings
