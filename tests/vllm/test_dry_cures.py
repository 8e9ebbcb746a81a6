"""Two verdicts of a dry load: this vLLM as it is, and with keepmtp's cures of its defects."""

from pathlib import Path

import pytest
from checkpoint_files import write
from follow import cures_that_end, site_of
from foreign_form import modelopt
from good import ours
from keepmtp.validate.dryload import check_on
from keepmtp.validate.dryload.check_on import Case, load_with_cures, with_loads
from keepmtp.validate.dryload.loader import Job
from keepmtp.validate.facts.vllm_env import find_vllm

CURE = "heads.k_exaone"
pytestmark = pytest.mark.vllm


@pytest.fixture
def nameless(tmp_path: Path) -> Case:
    """K-EXAONE's head, which modelopt's config cannot except."""
    folder = write(tmp_path / "exaone", modelopt("k-exaone-236b"))
    return Job(folder=folder), check_on.examine(folder)


def test_a_defect_is_one_and_its_cure_has_a_command(nameless, dry_loader):
    (account,) = load_with_cures(dry_loader("sm100"), [nameless])
    (found,) = with_loads(nameless[1], [account]).data.findings
    assert account.load.cures == (CURE,) and found.severity == "error"
    assert found.says.endswith(f"; with keepmtp's cures it loads ({CURE})")
    assert f"`KEEPMTP_CURES={CURE} vllm serve PATH`" in found.cure


def test_with_the_cure_taken_out_it_fails_again(nameless, dry_loader, monkeypatch):
    monkeypatch.setattr(check_on, "cures_in_vllm", lambda *of: ("heads.hy3_draft",))
    (account,) = load_with_cures(dry_loader("sm100"), [nameless])
    (found,) = with_loads(nameless[1], [account]).data.findings
    assert account.load.cures == () and "with keepmtp's cures" not in found.says + found.cure


def test_a_good_checkpoint_has_the_same_account_with_every_cure(tmp_path, dry_loader):
    folder = write(tmp_path / "glm", ours("glm-4.7", "NVFP4", "NVFP4"))
    plain, cured = dry_loader("sm100").load_all(
        [Job(folder=folder, cures=each) for each in ("", "1")]
    )
    measured = {"seconds": 0.0, "peak_mib": 0}
    own, other = (each.load.model_copy(update=measured) for each in (plain, cured))
    assert own.ok and own == other.model_copy(update={"cures": ()})
    assert plain.model_copy(update={"load": own}) == cured.model_copy(update={"load": own})


def test_every_cure_was_written_against_the_installed_source():
    vllm = find_vllm()
    told = dict(cures_that_end(site_of(vllm), vllm.version))
    assert {why for why in told.values() if not why.startswith("the defect is not in")} == set()
