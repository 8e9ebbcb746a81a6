"""Results of one checkpoint meet in one report only if the bytes are the same, and every number is
borne out.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import cards
import measured
import pytest
import reports
import stations
from commands import keepmtp
from data_files import json_of, put_json
from keepmtp.checkpoints.identity import file_sha256, identify
from keepmtp.checkpoints.source import open_source
from keepmtp.cli.measured import exit_status
from keepmtp.recipes.errors import CheckpointError
from keepmtp.recipes.protocol import Gates
from keepmtp.recipes.runtimes.vllm import NEWEST
from keepmtp.validate.facts.results import (
    STATIONS,
    checkpoint_folder,
    file_of,
    read_result,
    report_folder,
    write_result,
)
from keepmtp.validate.facts.schema import FullReport
from keepmtp.validate.report.check_data import record_static
from keepmtp.validate.report.report import (
    JSON_FILE,
    from_results,
    of_checkpoint,
    read_json,
    refresh,
    refuse_stale,
    text_of,
    verify,
)
from processes import until


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """All stations have run, and report.json is made of them."""
    evidence = measured.measured(tmp_path_factory.mktemp("made") / "glm.nvfp4")
    identity = identify(checkpoint_folder(evidence), cache=evidence)
    bench = stations.bench_fact(sha256=identity.sha256)
    measured.write(evidence, bench, identity)
    near = stations.closeness(evidence, checkpoint=identity.sha256)
    measured.write(evidence, near, identity)
    measured.write(evidence, stations.lossless((), (), ("Thai 1",)), identity)
    again(evidence)
    return evidence.parent


@pytest.fixture
def evidence(made, tmp_path) -> Path:
    """A copy that may be spoilt."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return tmp_path / "glm.nvfp4.report"


def again(evidence: Path) -> FullReport:
    """report.json alone, as `refresh` makes it; drawing the page takes a second."""
    full = from_results(evidence)
    (evidence / JSON_FILE).write_text(text_of(full))
    return full


def altered(path: Path, place: str, value: Any) -> None:
    """Change one value in a JSON file."""
    told = json_of(path)
    *way, last = (int(key) if key.isdigit() else key for key in place.split("."))
    inner = reduce(getitem, way, told)
    assert inner[last] != value
    inner[last] = value
    put_json(path, told)


# --- the files ------------------------------------------------------------------------------------


def test_where_evidence_lies(tmp_path):
    assert report_folder(tmp_path / "glm.w4a16-fp8") == tmp_path / "glm.w4a16-fp8.report"
    assert checkpoint_folder(tmp_path / "glm.w4a16-fp8.report") == tmp_path / "glm.w4a16-fp8"
    (tmp_path / "link").symlink_to(tmp_path / "glm")
    assert report_folder(tmp_path / "link") == tmp_path / "glm.report", (
        "one checkpoint has one folder"
    )
    with pytest.raises(CheckpointError, match=r"an evidence folder is NAME\.report"):
        checkpoint_folder(tmp_path / "glm")


def test_a_result_read_back_is_the_same(evidence):
    for station in STATIONS:
        before = file_of(evidence, station).read_bytes()
        found = read_result(evidence, station)
        assert (
            found is not None and found.station == station and found.vllm in (reports.VLLM, NEWEST)
        )
        write_result(evidence, found.data, checkpoint=found.checkpoint, vllm=found.vllm)
        kept = read_result(evidence, station)
        assert kept is not None and kept.data == found.data and kept.checkpoint == found.checkpoint
        assert (
            json.loads(before)["schema"]
            == STATIONS[station].form
            == {"check": 3, "serve": 5, "lossless": 1, "eval": 5, "bench": 3, "closeness": 3}[
                station
            ]
        )
    assert read_result(evidence.with_name("none.report"), "check") is None


@pytest.mark.parametrize(
    "written, other, says",
    [
        ('"schema": 5', '"schema": 3', "version 5; got one of serve, version 3"),
        ('"schema": 5', '"schema": 5, "colour": "red"', "version 5; got colour"),
        (
            '"station": "serve"',
            '"station": "eval"',
            "a result of serve, version 5; got one of eval",
        ),
        ('"num_prompts": 2', '"floor": "high"', r"version 5; got data\.num_prompts"),
    ],
)
def test_a_file_that_is_no_result(written, other, says, evidence):
    path = file_of(evidence, "serve")
    path.write_text(path.read_text().replace(written, other))
    with pytest.raises(
        CheckpointError,
        match=rf"serve\.json: .*{says}.*Run `keepmtp eval .*glm\.nvfp4` again",
    ):
        read_result(evidence, "serve")
    with pytest.raises(CheckpointError):
        from_results(evidence)


# --- the report of them ---------------------------------------------------------------------------


def test_a_report_is_made_of_the_results_and_nothing_else(evidence):
    """Not of the time either: twice the same to the byte."""
    before = (evidence / JSON_FILE).read_bytes()
    full = refresh(evidence)
    assert (evidence / JSON_FILE).read_bytes() == before
    assert verify(evidence) == full == read_json(evidence / JSON_FILE)
    assert full.made_at == "2030-01-02 04:00:00 UTC", "when the newest was measured"
    assert full.results == {
        f"{station}.json": file_sha256(file_of(evidence, station)) for station in STATIONS
    }
    assert full.identity == identify(checkpoint_folder(evidence))
    assert "keepmtp.json" in full.identity.files
    assert full.judgement.gates == Gates(**measured.LAX), "the checkpoint's own recipe's"
    assert full.judgement.verdict == "pass"
    assert "79.33 % of 120,000 drafted tokens accepted" in full.judgement.says
    assert not list(evidence.glob("*.partial"))


def test_a_station_that_did_not_run_is_told(evidence):
    for station in ("serve", "lossless", "eval", "bench", "closeness"):
        file_of(evidence, station).unlink()
        full = again(evidence)
        assert f"{station}.json" not in full.results and verify(evidence) == full
    assert full.judgement.verdict == "infeasible", "what was not measured did not pass"


def test_what_was_never_checked_is_checked_from_its_headers(evidence):
    for name in ("check.json", JSON_FILE):
        (evidence / name).unlink()
    with pytest.raises(
        CheckpointError,
        match=r"starts with the static check; got no check\.json. Run `keepmtp check",
    ):
        from_results(evidence)
    assert refresh(evidence).facts.num_mtp_layers == 1 and verify(evidence).identity is not None


def test_a_regression_is_no_green_report(tmp_path):
    """The twin of the good one: half of the right answers lost."""
    lost = measured.Answers(both=40, only_source=50, only_checkpoint=0, neither=10)
    full = from_results(measured.measured(tmp_path / "glm", answers=lost))
    assert full.judgement.verdict == "regression" and "gsm8k" in full.judgement.says


@pytest.mark.parametrize(
    "least, status",
    [
        (0.9, 0),
        (0.97, 1),
    ],
)
def test_one_judge_with_the_recipes_limit(least, status, tmp_path):
    """95.6 % of the source's acceptance: gate, headline and eval's exit status say the
    same.
    """
    folder = measured.checkpoint(
        tmp_path / "glm", record=measured.recorded(gates={"min_acceptance": least})
    )
    evidence, served = report_folder(folder), reports.accepting(17_208, 18_000, 20_000)
    identity = identify(folder, cache=evidence)
    record_static(evidence, open_source(folder), identity)
    write_result(evidence, served, checkpoint=identity, vllm=reports.VLLM)
    full = from_results(evidence)
    assert full.judgement.gates.min_acceptance == least
    verdicts = {reason.gate: reason.verdict for reason in full.judgement.reasons}
    assert verdicts["acceptance"] == ("regression" if status else "pass")
    assert exit_status(full.judgement, {"serve": served}) == status


def test_results_of_other_bytes_do_not_meet(evidence):
    """Both numbers are named, and what to do; a station refuses before its work."""
    folder = checkpoint_folder(evidence)
    before = identify(folder).sha256
    with open(next(folder.glob("*.safetensors")), "r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x7f")
    after = identify(folder, cache=evidence)
    assert after.sha256 != before
    cure = r"Remove it, and measure again with `keepmtp eval .*glm\.nvfp4`"
    says = (
        rf"(serve|eval)\.json: must be measured on the same bytes as the others, "
        rf"{after.sha256}; got {before}"
    )
    with pytest.raises(CheckpointError, match=rf"{says}\. {cure}"):
        refuse_stale(evidence, after, but=("check",))
    refuse_stale(evidence, after, but=[kind.part for kind in STATIONS.values()])
    record_static(evidence, open_source(folder), after)
    for make in (refresh, verify):
        with pytest.raises(CheckpointError, match=says):
            make(evidence)


def test_results_with_another_target_do_not_meet(tmp_path):
    """Of a draft of its own: another target than the one measured, and none."""
    folder = cards.draft(tmp_path / "draft")
    evidence = report_folder(folder)
    before = file_of(evidence, "check").read_bytes()
    other = shutil.copytree(reports.MODEL, tmp_path / "other")
    (other / "generation_config.json").write_text("{}")
    says = "serve.json: must be measured with the same target as the others, "
    done = keepmtp(f"check {other} --draft {folder} --record", status=2)
    assert f"{says}{other}" in done.stderr
    assert file_of(evidence, "check").read_bytes() == before
    again = shutil.copytree(reports.MODEL, tmp_path / "again")
    keepmtp(f"check {again} --draft {folder} --record", status=0)
    verify(evidence)
    file_of(evidence, "check").unlink()
    cure = rf"measure again with `keepmtp eval {reports.MODEL} --draft {folder}`"
    with pytest.raises(CheckpointError, match=rf"{says}None; got .*{cure}"):
        refresh(evidence)


def test_an_edited_draft_is_judged_again(tmp_path):
    """That it is a draft alone is no error; a config that counts no layer is one."""
    folder = cards.draft(tmp_path / "draft")
    assert of_checkpoint(folder).target is not None
    config = json_of(folder / "config.json")
    put_json(folder / "config.json", config | {"num_nextn_predict_layers": 0})
    with pytest.raises(CheckpointError, match=r"must have the error of .*num_nextn_predict"):
        of_checkpoint(folder)


def test_a_check_of_the_same_bytes_is_kept(evidence):
    """It may hold dry loads, which a server's own check would lose."""
    before = file_of(evidence, "check").read_bytes()
    folder = checkpoint_folder(evidence)
    record_static(evidence, open_source(folder), identify(folder))
    assert file_of(evidence, "check").read_bytes() == before


@pytest.mark.parametrize(
    "recipe, says",
    [
        ({"gates": {"max_drop": 2}}, "must be as a recipe has it; got max_drop"),
        ({"gates": None}, ""),
        (7, "must be keepmtp's own record; got keepmtp: Field required"),
    ],
)
def test_gates_are_those_of_the_record(recipe, says, tmp_path):
    record = measured.recorded(**recipe) if isinstance(recipe, dict) else {"recipe": recipe}
    folder = measured.checkpoint(tmp_path / "glm", record=record)
    evidence = report_folder(folder)
    record_static(evidence, open_source(folder), identify(folder))
    if says:
        with pytest.raises(CheckpointError, match=says):
            from_results(evidence)
        return
    assert from_results(evidence).judgement.gates == Gates()


def test_a_changed_record_is_no_other_gate(evidence):
    """Laxer limits, written into the checkpoint after it was measured."""
    altered(checkpoint_folder(evidence) / "keepmtp.json", "recipe.gates.max_drop", 0.9)
    with pytest.raises(
        CheckpointError,
        match=r"keepmtp\.json: must be the file that was measured, [0-9a-f]{64}; got",
    ):
        verify(evidence)


# --- altered by hand ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "place, value",
    [
        ("evaluation.checkpoint.scores.0.value", 0.99),
        ("serve.checkpoint.runs.1.acceptance", 0.99),
        ("judgement.gates.max_drop", 0.9),
        ("identity.sha256", "0000000000000000000000000000000000000000000000000000000000000000"),
    ],
)
def test_a_number_altered_in_the_report_is_named(place, value, evidence):
    altered(evidence / JSON_FILE, place, value)
    says = re.escape(f"report.json: {place.partition('.')[0]}: must be as the result files make it")
    with pytest.raises(CheckpointError, match=f"{says}; .*Run `keepmtp check"):
        verify(evidence)


@pytest.mark.parametrize("station", STATIONS)
def test_an_edited_result_is_measured_again(station, evidence):
    """One digit: no command but the station's own takes it back."""
    path = file_of(evidence, station)
    path.write_text(re.sub(r'"vllm": "0.3\d.0"', '"vllm": "0.32.9"', path.read_text(), count=1))
    before = (evidence / JSON_FILE).read_bytes()
    for make in (verify, refresh):
        with pytest.raises(
            CheckpointError, match=rf"{station}\.json: must be as its station wrote it, .* edited"
        ):
            make(evidence)
    assert (evidence / JSON_FILE).read_bytes() == before


@pytest.mark.few(2)
@pytest.mark.parametrize("station", [*STATIONS][1:])
def test_a_result_that_is_gone_or_newer_makes_a_new_report(station, evidence):
    """A station was killed before it made the report; what is not there is not measured."""
    path = file_of(evidence, station)
    found = read_result(evidence, station)
    assert found is not None
    write_result(
        evidence,
        found.data,
        checkpoint=found.checkpoint,
        vllm=found.vllm,
        made_at="2031-01-02 00:00:00 UTC",
    )
    for made_at in ("2031-01-02 00:00:00 UTC", "2030-01-02 0"):
        with pytest.raises(CheckpointError, match=r"report\.json: .* Run `keepmtp check"):
            verify(evidence)
        assert refresh(evidence).made_at.startswith(made_at) and verify(evidence)
        path.unlink(missing_ok=True)


@pytest.mark.parametrize("name", ["gsm8k.checkpoint.jsonl", "closeness.checkpoint.jsonl"])
def test_answers_that_were_not_counted_are_refused(name, evidence):
    path = evidence / name
    path.write_text(path.read_text() + "\n")
    with pytest.raises(CheckpointError, match=rf"{name}: must be the file that was counted, \w+; "):
        verify(evidence)
    path.unlink()
    with pytest.raises(CheckpointError, match=rf"{name}: .*; got no such file\. Run `keepmtp"):
        from_results(evidence)


# --- killed ---------------------------------------------------------------------------------------


def test_a_killed_refresh_leaves_a_whole_report(evidence):
    """Killed at three moments: what is read is always one whole report, and the next refresh is
    clean.
    """
    code = (
        "import sys; from pathlib import Path; from keepmtp.validate.report.report import refresh\n"
        "while True: refresh(Path(sys.argv[1]))"
    )
    wanted = (evidence / JSON_FILE).read_bytes()
    for moment in range(3):
        (evidence / JSON_FILE).unlink()
        with subprocess.Popen([sys.executable, "-c", code, str(evidence)]) as process:
            until((evidence / JSON_FILE).is_file)
            time.sleep(0.05 * moment)
            os.kill(process.pid, signal.SIGKILL)
        assert (evidence / JSON_FILE).read_bytes() == wanted
        assert verify(evidence).made_at == "2030-01-02 04:00:00 UTC"
    refresh(evidence)
    assert not list(evidence.glob("*.partial"))
