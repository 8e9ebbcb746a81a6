"""`keepmtp eval --only gates` as people and scripts call it: exit status, table, JSON, and what it refuses to
judge.
"""

import json
from pathlib import Path

import pytest
from commands import assert_shows, keepmtp, ran, refused
from data_files import cases
from keepmtp.validate.report.report import refresh
from measured import Answers, measured

GATES = ["findings", "loads", "acceptance", "gsm8k"]


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_good_checkpoint_passes():
    refresh(measured(Path("glm.nvfp4")))
    table = ran("eval glm.nvfp4 --only gates", COLUMNS="80")
    assert_shows(
        table,
        "gate glm.nvfp4 gate verdict reason",
        "findings pass No error in config.json and the headers. loads pass Its own bytes",
        "acceptance pass On 60 questions of gsm8k with k=3: 79.33 % of 120,000 drafted tokens "
        "accepted, 79.33 % of the source's.",
        "gsm8k pass gsm8k, flexible-extract: 88.33 % of 60 questions, the source 86.67 %",
    )
    assert table.endswith("\npass\n")
    assert ran("eval glm.nvfp4.report --only gates", COLUMNS="80") == table
    told = json.loads(ran("eval glm.nvfp4 --only gates --json"))
    assert (told["verdict"], len(told["sha256"])) == ("pass", 64)
    assert told["gates"]["max_drop"] == 0.2, "the recipe's own"
    assert [reason["gate"] for reason in told["reasons"]] == GATES


@pytest.mark.few(1)
@cases
def test_what_does_not_pass_has_its_own_exit_status(answers, status, verdict, says):
    refresh(measured(Path("glm"), answers=Answers(**answers)))
    told = json.loads(ran("eval glm --only gates --json", status=status))
    (reason,) = [reason for reason in told["reasons"] if reason["verdict"] != "pass"]
    assert told["verdict"] == reason["verdict"] == verdict and reason["gate"] == "gsm8k"
    assert (reason["needed"] is None) == (verdict == "regression")
    assert_shows(ran("eval glm --only gates", status=status), *says)


@pytest.mark.full
def test_what_cannot_be_judged_is_refused():
    """A number altered by hand, a byte changed since: one sentence, and no verdict."""
    folder = measured(Path("glm"))
    refresh(folder)
    report = folder / "report.json"
    text = report.read_text()
    report.write_text(text.replace('"verdict": "pass"', '"verdict": "infeasible"', 1))
    refused("eval glm --only gates", says="report.json: judgement: ")
    report.write_text(text)
    shard = next(Path("glm").glob("*.safetensors"))
    with open(shard, "r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x7f")
    done = keepmtp("eval glm --only gates")
    assert done.returncode == 2 and not done.stdout
    says = f"must be the bytes that its report is about; got another {shard.name}"
    assert says in done.stderr.splitlines()[-1]
