"""How a cure ends where there is no vLLM; with one, test_cured_failures.py judges real cures."""

from pathlib import Path

from checkpoint_files import write
from good import GOOD
from keepmtp.cure.judged import judge


def test_without_vllm_the_check_is_still_made_and_what_was_not_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_PYTHON", str(tmp_path / "nowhere"))
    folder = write(tmp_path / "good", GOOD["glm fp8"]())
    judged = judge(folder)
    assert judged.ok and judged.no_vllm is not None and "VLLM_PYTHON" in str(judged.no_vllm)
    assert judge(folder, gpus=()).no_vllm is None


def test_findings_have_the_name_that_people_know_the_checkpoint_by(tmp_path):
    checkpoint = GOOD["glm fp8"]()
    checkpoint.config["model_type"] = "nobody"
    judged = judge(write(tmp_path / "headers", checkpoint), gpus=(), name="org/model")
    assert not judged.ok and judged.checked.data.path == "org/model"
    assert not any(str(Path(tmp_path)) in finding.where for finding in judged.checked.data.findings)
