"""`keepmtp gate` as people and scripts call it: exit status, table, JSON, and what it refuses to
judge.
"""

import json
import subprocess
from pathlib import Path

import pytest
from commands import keepmtp
from keepmtp.validate.facts.results import file_of, report_folder
from keepmtp.validate.report.report import refresh
from measured import Answers, checkpoint, measured

GATES = ["findings", "loads", "acceptance", "gsm8k"]


def gate(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return keepmtp("gate", *words, COLUMNS="400")


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    """A checkpoint that passes every gate; tests that alter it make their own."""
    folder = tmp_path_factory.mktemp("gate") / "glm.nvfp4"
    refresh(measured(folder))
    return folder


def test_a_good_checkpoint_passes(good):
    for words in ((good,), (report_folder(good),)):
        done = gate(*words)
        assert done.returncode == 0, done.stdout + done.stderr
        assert (
            "flexible-extract: 88.33 % of 60 questions" in done.stdout
            and done.stdout.split()[-1] == "pass"
        )
        rows = [line.split()[:2] for line in done.stdout.splitlines() if " pass " in line]
        assert rows == [[name, "pass"] for name in GATES]
    told = json.loads(gate(good, "--json").stdout)
    assert (told["verdict"], len(told["sha256"])) == ("pass", 64)
    assert told["gates"]["max_drop"] == 0.2, "the recipe's own"
    assert [reason["gate"] for reason in told["reasons"]] == GATES


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("answers", "status", "verdict"),
    [
        (Answers(both=30, only_source=40, only_checkpoint=1, neither=9), 1, "regression"),
        (Answers(both=30, only_source=12, only_checkpoint=3, neither=9), 3, "infeasible"),
    ],
)
def test_what_does_not_pass_has_its_own_exit_status(answers, status, verdict, tmp_path):
    refresh(measured(tmp_path / "glm", answers=answers))
    done = gate(tmp_path / "glm", "--json")
    told = json.loads(done.stdout)
    (reason,) = [reason for reason in told["reasons"] if reason["verdict"] != "pass"]
    assert (done.returncode, told["verdict"], reason["gate"], reason["verdict"]) == (
        status,
        verdict,
        "gsm8k",
        verdict,
    )
    assert (reason["needed"] is None) == (verdict == "regression")
    table = gate(tmp_path / "glm")
    assert table.returncode == status and table.stdout.splitlines()[-1] == (
        "too few samples" if status == 3 else verdict
    )
    assert ("Too few to tell" in table.stdout) == (verdict == "infeasible")


def test_what_was_not_measured_is_infeasible(tmp_path):
    folder = measured(tmp_path / "glm")
    file_of(folder, "gsm8k").unlink()
    file_of(folder, "serve").unlink()
    refresh(folder)
    done = gate(tmp_path / "glm")
    assert done.returncode == 3
    for command in ("keepmtp check CHECKPOINT --gpu sm100 --record", "keepmtp eval CHECKPOINT"):
        assert f"`{command}`" in done.stdout


@pytest.mark.full
def test_what_cannot_be_judged_is_refused(tmp_path):
    """Nothing measured, a number altered by hand, a byte changed since: one sentence, and no
    verdict.
    """
    checkpoint(tmp_path / "bare")
    done = gate(tmp_path / "bare")
    assert done.returncode == 2 and "got no report.json. Run `keepmtp check" in done.stderr
    folder = measured(tmp_path / "glm")
    refresh(folder)
    report = folder / "report.json"
    text = report.read_text()
    report.write_text(text.replace('"verdict": "pass"', '"verdict": "infeasible"', 1))
    done = gate(tmp_path / "glm")
    assert done.returncode == 2 and "report.json: judgement: " in done.stderr and not done.stdout
    report.write_text(text)
    shard = next((tmp_path / "glm").glob("*.safetensors"))
    with open(shard, "r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x7f")
    done = gate(tmp_path / "glm")
    assert (
        done.returncode == 2
        and "must be the bytes that its report is about" in done.stderr
        and not done.stdout
    )
    assert f"got another {shard.name}" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: ")
