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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import benches
import measured
import pytest
import reports
from closenesses import closeness
from keepmtp.checkpoints.files import write_whole
from keepmtp.checkpoints.identity import file_sha256, identify
from keepmtp.checkpoints.source import open_source
from keepmtp.cli.serve_check import exit_status
from keepmtp.recipes.errors import CheckpointError
from keepmtp.recipes.protocol import Gates
from keepmtp.validate.facts.results import (
    SCHEMAS,
    STATIONS,
    checkpoint_folder,
    file_of,
    read_result,
    report_folder,
    seal_of,
    write_result,
)
from keepmtp.validate.facts.schema import FullReport
from keepmtp.validate.report.check_data import record_static
from keepmtp.validate.report.report import (
    JSON_FILE,
    from_results,
    read_json,
    refresh,
    refuse_stale,
    verify,
    write_json,
)

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """All stations have run, and report.json is made of them."""
    evidence = measured.measured(tmp_path_factory.mktemp("made") / "glm.nvfp4")
    identity = identify(checkpoint_folder(evidence), cache=evidence)
    bench = benches.bench_fact(sha256=identity.sha256)
    benches.write_lines(evidence, bench)
    write_result(
        evidence, "bench", bench, checkpoint=identity, vllm=reports.VLLM, made_at=measured.SERVED_AT
    )
    near = closeness(evidence, checkpoint=identity.sha256)
    write_result(
        evidence,
        "closeness",
        near,
        checkpoint=identity,
        vllm=reports.VLLM,
        made_at=measured.SERVED_AT,
    )
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
    write_json(evidence, full)
    return full


def altered(path: Path, *place: str | int, value: Any) -> str:
    """Change one value in a JSON file; returns its place in dots."""
    told = json.loads(path.read_text())
    inner = told
    for key in place[:-1]:
        inner = inner[key]
    assert inner[place[-1]] != value
    inner[place[-1]] = value
    path.write_text(json.dumps(told))
    return ".".join(map(str, place))


def forged(path: Path, *place: str | int, value: Any) -> str:
    """`altered`, by somebody who also computes the seal anew."""
    field = altered(path, *place, value=value)
    told = json.loads(path.read_text())
    path.write_text(json.dumps(told | {"seal": seal_of(told)}))
    return field


def refused(evidence: Path, says: str) -> None:
    """Neither `keepmtp gate` nor `keepmtp report` takes the results, nor the one after the
    other.
    """
    before = (evidence / JSON_FILE).read_bytes()
    for make in (verify, refresh, verify):
        with pytest.raises(
            CheckpointError, match=f"{says}|must be the file that" if make is refresh else None
        ):
            make(evidence)
    assert (evidence / JSON_FILE).read_bytes() == before
    with pytest.raises(CheckpointError, match=says):
        from_results(evidence)


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
        assert found is not None and found.station == station and found.vllm == reports.VLLM
        write_result(evidence, station, found.data, checkpoint=found.checkpoint, vllm=found.vllm)
        kept = read_result(evidence, station)
        assert kept is not None and kept.data == found.data and kept.checkpoint == found.checkpoint
        assert (
            json.loads(before)["schema"]
            == SCHEMAS[station]
            == {"check": 2, "serve": 3, "gsm8k": 3, "bench": 1, "closeness": 1}[station]
        )
    assert read_result(evidence.with_name("none.report"), "check") is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda told: told | {"schema": 2}, "version 3; got schema"),
        (lambda told: told | {"colour": "red"}, "version 3; got colour"),
        (lambda told: told | {"station": "gsm8k"}, "must be a result of serve; got gsm8k"),
        (
            lambda told: {key: told[key] for key in told if key != "checkpoint"},
            "version 3; got checkpoint",
        ),
        (
            lambda told: told | {"data": told["data"] | {"floor": "high"}},
            r"version 3; got data\.floor",
        ),
        (
            lambda told: told | {"data": told["data"] | {"seconds": "long"}},
            r"version 3; got data\.seconds",
        ),
    ],
)
def test_a_file_that_is_no_result(change, says, evidence):
    path = file_of(evidence, "serve")
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(
        CheckpointError,
        match=rf"serve\.json: .*{says}.*Run `keepmtp serve-check .*glm\.nvfp4` again",
    ):
        read_result(evidence, "serve")
    with pytest.raises(CheckpointError):
        from_results(evidence)


def test_what_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="must be writable; got"):
        write_whole(tmp_path / "file" / "check.json", "{}")


# --- the report of them ---------------------------------------------------------------------------


def test_a_report_is_made_of_the_results_and_nothing_else(evidence):
    """Not of the time either: twice the same to the byte."""
    before = (evidence / JSON_FILE).read_bytes()
    full = refresh(evidence)
    assert (evidence / JSON_FILE).read_bytes() == before and verify(evidence) == full == read_json(
        evidence / JSON_FILE
    )
    assert full.made_at == "2030-01-02 04:00:00 UTC", "when the newest was measured"
    assert full.results == {
        f"{station}.json": file_sha256(file_of(evidence, station)) for station in STATIONS
    }
    identity = identify(checkpoint_folder(evidence))
    assert (
        full.identity == identity
        and "keepmtp.json" in identity.files
        and not full.absent.keys() & {"identity"}
    )
    assert full.judgement is not None and full.judgement.gates == Gates(**measured.LAX), (
        "the checkpoint's own recipe's"
    )
    assert full.verdict.ok and full.verdict.label == "Loads and drafts"
    answers = (
        "it answers 88.33 % of 60 questions of gsm8k right (source: 86.67 %) by flexible-extract"
    )
    assert answers in full.verdict.says
    assert (evidence / "report.html").is_file() and not list(evidence.glob("*.partial"))


def test_a_station_that_did_not_run_is_told(evidence):
    for station in ("serve", "gsm8k", "bench", "closeness"):
        file_of(evidence, station).unlink()
        full = again(evidence)
        assert f"{station}.json" not in full.results and verify(evidence) == full
    assert (
        full.absent.keys() >= {"serve", "evaluation", "dry"}
        and full.verdict.label == "No fault found"
    )
    assert full.judgement is not None and full.judgement.verdict == "infeasible", (
        "what was not measured did not pass"
    )


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
    assert full.judgement is not None and full.judgement.verdict == "regression"
    assert (
        not full.verdict.ok and full.verdict.label == "Not ready" and "gsm8k" in full.verdict.says
    )


@pytest.mark.parametrize(("least", "status"), [(0.90, 0), (0.97, 1)])
def test_one_judge_with_the_recipes_limit(least, status, tmp_path):
    """95.6 % of the source's acceptance: gate, headline and serve-check's exit status say the
    same.
    """
    folder = measured.checkpoint(
        tmp_path / "glm", record=measured.recorded(gates={"min_acceptance": least})
    )
    evidence, served = report_folder(folder), reports.served(is_copy=False)
    for role, share in (("source", 0.9), ("checkpoint", 0.9 * 0.956)):
        drafting = reports.run(1, shares=(share,), num_drafts=20_000, speed_up=1.0, partings=())
        runs = (reports.run(0), drafting)
        served = served.model_copy(
            update={role: getattr(served, role).model_copy(update={"runs": runs})}
        )
    identity = identify(folder, cache=evidence)
    record_static(evidence, open_source(folder), identity)
    write_result(evidence, "serve", served, checkpoint=identity, vllm=reports.VLLM)
    full = from_results(evidence)
    assert full.judgement is not None and full.judgement.gates.min_acceptance == least
    verdicts = {reason.gate: reason.verdict for reason in full.judgement.reasons}
    assert verdicts["acceptance"] == ("regression" if status else "pass")
    assert (full.verdict.ok, full.verdict.label) == (
        not status,
        "Not ready" if status else "Loads and drafts",
    )
    assert exit_status(full.judgement, served) == status


def test_results_of_other_bytes_do_not_meet(evidence):
    """Both numbers are named, and what to do; a station refuses before its work."""
    folder = checkpoint_folder(evidence)
    before = identify(folder).sha256
    with open(next(folder.glob("*.safetensors")), "r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x7f")
    after = identify(folder, cache=evidence)
    assert after.sha256 != before
    cure = r"Remove it, and measure again with `keepmtp (serve-check|eval) .*glm\.nvfp4`"
    says = (
        rf"(serve|gsm8k)\.json: must be measured on the same bytes as the others, "
        rf"{after.sha256}; got {before}"
    )
    with pytest.raises(CheckpointError, match=rf"{says}\. {cure}"):
        refuse_stale(evidence, after, but=("check",))
    refuse_stale(evidence, after, but=STATIONS)
    record_static(evidence, open_source(folder), after)
    for make in (from_results, refresh, verify):
        with pytest.raises(
            CheckpointError, match=says if make is not verify else r"check\.json: must be the file"
        ):
            make(evidence)


def test_a_check_of_the_same_bytes_is_kept(evidence):
    """It may hold dry loads, which a server's own check would lose."""
    before = file_of(evidence, "check").read_bytes()
    folder = checkpoint_folder(evidence)
    record_static(evidence, open_source(folder), identify(folder))
    assert file_of(evidence, "check").read_bytes() == before


@pytest.mark.parametrize(
    ("record", "says"),
    [
        (
            measured.recorded(gates={"max_drop": 2}),
            r"recipe\.gates must be as a recipe has it; got max_drop",
        ),
        (
            measured.recorded(gates={"colour": 2}),
            r"recipe\.gates must be as a recipe has it; got colour",
        ),
        (measured.recorded(), ""),
        (measured.recorded(gates=None), ""),
        ({"recipe": 7}, "must be keepmtp's own record; got keepmtp: Field required"),
        (
            measured.recorded() | {"recipe": 7},
            r"must be keepmtp's own record; got recipe: Input should be",
        ),
        ([7], "must be keepmtp's own record; got a list"),
    ],
)
def test_gates_are_those_of_the_record(record, says, tmp_path):
    folder = measured.checkpoint(tmp_path / "glm", record=record)
    evidence = report_folder(folder)
    record_static(evidence, open_source(folder), identify(folder))
    if says:
        with pytest.raises(CheckpointError, match=says):
            from_results(evidence)
        return
    judgement = from_results(evidence).judgement
    assert judgement is not None and judgement.gates == Gates()


def test_a_changed_record_is_no_other_gate(evidence):
    """Laxer limits, written into the checkpoint after it was measured."""
    altered(checkpoint_folder(evidence) / "keepmtp.json", "recipe", "gates", "max_drop", value=0.9)
    with pytest.raises(
        CheckpointError,
        match=r"keepmtp\.json: must be the file that was measured, [0-9a-f]{64}; got",
    ):
        verify(evidence)


# --- altered by hand ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "value", "wanted"),
    [
        (("evaluation", "checkpoint", "scores", 0, "value"), 0.99, "0.88"),
        (("evaluation", "paired", 1, "low"), 0.0, ""),
        (("serve", "checkpoint", "runs", 1, "accepted_tokens"), 999, "920"),
        (("serve", "checkpoint", "runs", 1, "acceptance"), 0.99, "0.92"),
        (("serve", "checkpoint", "runs", 3, "partings", 0, "is_near_tie"), False, "True"),
        (("judgement", "reasons", 2, "says"), "All is well.", ""),
        (("facts", "num_bytes"), 7, ""),
        (("sizes", 0, "num_bytes"), 1, ""),
        (("judgement", "verdict"), "regression", ""),
        (("judgement", "gates", "max_drop"), 0.9, "0.2"),
        (("verdict", "says"), "It is perfect.", ""),
        (("identity", "sha256"), "0" * 64, ""),
        (("made_at",), "2031-01-01 00:00:00 UTC", ""),
        (("absent", "dry"), "No need.", ""),
    ],
    ids=lambda value: ".".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_a_number_altered_in_the_report_is_named(place, value, wanted, evidence):
    field = altered(evidence / JSON_FILE, *place, value=value)
    says = re.escape(f"report.json: {field}: must be as the result files make it, {wanted}")
    cure = re.escape(f"Run `keepmtp report {evidence}`")
    with pytest.raises(CheckpointError, match=f"{says}.*; got .*{cure}"):
        verify(evidence)


@pytest.mark.parametrize("station", STATIONS)
def test_an_edited_result_is_measured_again(station, evidence):
    """One digit: no command but the station's own takes it back."""
    path = file_of(evidence, station)
    path.write_text(path.read_text().replace('"vllm": "0.32.0"', '"vllm": "0.32.9"', 1))
    commands = {"check": "check .* --record", "serve": "serve-check .*", "gsm8k": "eval .*"}
    words = commands.get(station, f"{station} .*")
    refused(
        evidence,
        rf"{station}\.json: must be as its station wrote it, .* edited\. Run `keepmtp {words}` "
        rf"again",
    )


@pytest.mark.parametrize("station", STATIONS)
def test_a_result_gone_or_replaced_by_an_older_one_is_not_reported(station, evidence):
    """A red result that is removed leaves no green report."""
    path, says = (
        file_of(evidence, station),
        rf"{station}\.json: must be the file that report\.json was made from",
    )
    kept = path.read_text()
    path.unlink()
    for make in (verify, refresh):
        with pytest.raises(
            CheckpointError, match=rf"{says}, \w{{64}}; got no such file\. Run `keepmtp .*` again"
        ):
            make(evidence)
    path.write_text(kept)
    forged(path, "made_at", value="2029-01-02 03:04:05 UTC")
    for make in (verify, refresh):
        with pytest.raises(
            CheckpointError,
            match=rf"{says}.* Run `keepmtp (check|serve-check|eval|bench|closeness) .*` again",
        ):
            make(evidence)


@pytest.mark.few(1)
@pytest.mark.parametrize("station", STATIONS)
def test_a_newer_result_makes_a_new_report(station, evidence):
    """A station was killed before it made the report; or a result is there for the first time."""
    path = file_of(evidence, station)
    forged(path, "made_at", value="2031-01-02 03:04:05 UTC")
    with pytest.raises(
        CheckpointError, match=r"must be the file that report\.json .* Run `keepmtp report"
    ):
        verify(evidence)
    assert refresh(evidence).made_at == "2031-01-02 03:04:05 UTC" and verify(evidence)
    if station == "check":
        return
    altered(evidence / JSON_FILE, "results", value={})
    with pytest.raises(CheckpointError, match=r"must be made from every result, \w+\.json too"):
        verify(evidence)


def test_a_station_makes_the_report_of_what_it_has_just_written(evidence):
    """Its own file may be another; those of the other stations may not."""
    forged(file_of(evidence, "serve"), "made_at", value="2029-01-02 03:04:05 UTC")
    assert refresh(evidence, measured="serve").results["serve.json"] == file_sha256(
        file_of(evidence, "serve")
    )
    file_of(evidence, "gsm8k").unlink()
    with pytest.raises(CheckpointError, match=r"gsm8k\.json: must be the file .* got no such file"):
        refresh(evidence, measured="serve")


# --- edited together with its seal ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "value", "says"),
    [
        (("facts", "num_mtp_layers"), 0, r"facts: must be what the evidence gives"),
        (("sizes", 0, "num_bytes"), 1, r"sizes: must be what the evidence gives"),
    ],
)
def test_what_the_headers_do_not_give_is_refused(place, value, says, evidence):
    forged(file_of(evidence, "check"), "data", *place, value=value)
    refused(evidence, rf"check\.json: {says}.* Run `keepmtp check .* --record` again")


def test_emptied_findings_are_found_again(evidence):
    """An error that somebody takes out of check.json: the headers still have it."""
    folder = checkpoint_folder(evidence)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    shutil.rmtree(evidence)
    record_static(evidence, open_source(folder), identify(folder))
    full = refresh(evidence)
    assert not full.verdict.ok and full.findings
    forged(file_of(evidence, "check"), "data", "findings", value=[])
    says = r"check\.json: findings: must be what the evidence gives, .*; got no such finding"
    refused(evidence, rf"{says}\. Run `keepmtp check .* --record")


def test_a_failed_dry_load_has_a_finding(evidence):
    found = read_result(evidence, "check")
    assert found is not None
    failed = reports.account("sm100", 1, failure=reports.REFUSED).load.model_copy(
        update={"num_errors": 1}
    )
    for load in (failed, failed.model_copy(update={"ok": True})):
        data = found.data.model_copy(update={"dry": (load,)})
        write_result(evidence, "check", data, checkpoint=found.checkpoint, vllm=found.vllm)
        says = (
            r"dry load on sm100 at TP 1: .*Run `keepmtp check .* --record` again with the same "
            r"--gpu and --tp"
        )
        with pytest.raises(CheckpointError, match=says):
            refresh(evidence, measured="check")


@pytest.mark.parametrize(
    ("place", "value", "says"),
    [
        (
            ("accepted_tokens",),
            999,
            "accepted_tokens: must be what the evidence gives, 920; got 999",
        ),
        (("accepted_per_position",), [1000], "accepted_tokens: must be"),
        (("drafts",), 900, "accepted at the first position"),
        (("draft_tokens",), 1001, "draft_tokens, at most k a draft"),
        (("draft_tokens",), 919, "accepted_tokens, of those drafted"),
        (("speed_up",), 9.0, "speed_up: must be what the evidence gives, 1.46"),
        (("outputs",), [], "outputs: must be what the evidence gives, 2; got 0"),
        (("outputs", 0, "token_ids"), [7], "partings: must be"),
        (("error",), "ValueError", "loaded: must be"),
        (("partings",), [reports.NEAR.model_dump()], "partings: must be"),
    ],
)
def test_a_server_that_contradicts_itself_is_refused(place, value, says, evidence):
    forged(file_of(evidence, "serve"), "data", "checkpoint", "runs", 1, *place, value=value)
    refused(evidence, rf"serve\.json: checkpoint, k=1: {says}.*Run `keepmtp serve-check")


@pytest.mark.parametrize(
    ("place", "value", "says"),
    [
        (("sha256",), "1" * 64, "checkpoint.sha256: must be what the evidence gives"),
        (
            ("cells", 1, "repetitions", 0, "drafts"),
            9,
            "k=1, 1 at once, repetition 0: accepted at the first position",
        ),
        (
            ("cells", 1, "repetitions", 2, "accepted_tokens"),
            1,
            "repetition 2: accepted_tokens: must be",
        ),
        (
            ("cells", 0, "repetitions", 0, "output_tokens"),
            99999,
            "k=0, 1 at once, repetition 0: output_tokens, at most",
        ),
    ],
)
def test_a_speed_matrix_that_contradicts_itself_is_refused(place, value, says, evidence):
    forged(file_of(evidence, "bench"), "data", "checkpoint", *place, value=value)
    refused(evidence, rf"bench\.json: .*{says}.*Run `keepmtp bench")


def test_a_repetition_that_no_line_has_is_refused(evidence):
    """The seal is computed anew, as somebody would who makes a checkpoint faster."""
    place = ("cells", 3, "repetitions", 1, "seconds")
    forged(file_of(evidence, "bench"), "data", "checkpoint", *place, value=1.0)
    says = r"checkpoint, k=3, 1 at once, repetition 1: is a line of bench\.checkpoint\.jsonl"
    refused(evidence, rf"bench\.json: {says}.*Run `keepmtp bench")


def test_repetitions_that_were_set_aside_still_count(evidence):
    path = evidence / "bench.checkpoint.jsonl"
    path.rename(evidence / "bench.checkpoint.01234567.jsonl")
    assert from_results(evidence).bench
    (evidence / "bench.checkpoint.01234567.jsonl").unlink()
    with pytest.raises(
        CheckpointError,
        match=r"is a line of bench\.checkpoint\.jsonl: must be .*Run `keepmtp bench",
    ):
        from_results(evidence)


def test_answers_altered_in_their_file_are_refused(evidence):
    path = evidence / "gsm8k.checkpoint.jsonl"
    path.write_text(path.read_text().replace('"strict-match":false', '"strict-match":true', 1))
    with pytest.raises(
        CheckpointError, match=r"samples_sha256: must be what the evidence gives, \w{64}; got"
    ):
        verify(evidence)
    path.unlink()
    with pytest.raises(
        CheckpointError, match=r"checkpoint\.samples_sha256: .* gives, no such file; got"
    ):
        verify(evidence)


LINES: dict[str, tuple[str, str]] = {
    "checkpoint.scores.0.value": ('"strict-match":false', '"strict-match":true'),
    "checkpoint.scores.1.value": ('"flexible-extract":true', '"flexible-extract":false'),
    "checkpoint.num_truncated": ('"finish_reason":"stop"', '"finish_reason":"length"'),
    "checkpoint.num_tokens": ('"num_tokens":130', '"num_tokens":131'),
    "checkpoint.accepted_tokens": ('"accepted_tokens":', '"accepted_tokens":1'),
    "checkpoint.as_served": ('"as_served":"native"', '"as_served":"BF16 copy of the same weights"'),
    "checkpoint.sha256": ('"checkpoint_sha256":"', '"checkpoint_sha256":"0'),
    "checkpoint.protocol": ('"max_tokens":1024', '"max_tokens":512'),
    "checkpoint.dataset_sha256": ('"dataset_sha256":"d', '"dataset_sha256":"e'),
}


@pytest.mark.parametrize("figure", LINES)
def test_answers_that_do_not_give_the_score_are_refused(figure, evidence):
    """Altered together with the hash in gsm8k.json, and the report made anew: the figure itself is
    computed again.
    """
    path = evidence / "gsm8k.checkpoint.jsonl"
    path.write_text(path.read_text().replace(*LINES[figure], 1))
    forged(
        file_of(evidence, "gsm8k"), "data", "checkpoint", "samples_sha256", value=file_sha256(path)
    )
    refused(evidence, re.escape(f"gsm8k.json: {figure}: must be what the evidence gives, "))


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("checkpoint", "scores", 0, "value"), 0.99),
        (("source", "scores", 1, "stderr"), 0.0),
        (("paired", 0, "difference"), 0.5),
        (("paired", 1, "only_source"), 0),
        (("paired", 0, "high"), 1.0),
        (("source", "drafts"), 1),
        (("checkpoint", "seconds"), 1.0),
        (("source", "num_questions"), 61),
    ],
)
def test_a_figure_that_the_answers_do_not_give_is_refused(place, value, evidence):
    """A better number in gsm8k.json and everything after it made to match."""
    field = forged(file_of(evidence, "gsm8k"), "data", *place, value=value).removeprefix("data.")
    refused(evidence, re.escape(f"gsm8k.json: {field}: must be what the evidence gives, "))


def test_what_drafting_changed_is_counted_again_from_the_answers(tmp_path):
    """Five of sixty answers switch: a report that hides one is refused, and so are other plain
    answers.
    """
    evidence = measured.measured(tmp_path / "tiny", has_plain=True)
    again(evidence)
    assert verify(evidence).evaluation is not None
    place = ("data", "drafting", "num_changed")
    field = forged(file_of(evidence, "gsm8k"), *place, value=7).removeprefix("data.")
    refused(evidence, re.escape(f"gsm8k.json: {field}: must be what the evidence gives, 0"))


def test_answers_lie_in_the_folder(evidence):
    forged(file_of(evidence, "gsm8k"), "data", "checkpoint", "samples", value="../elsewhere.jsonl")
    refused(
        evidence,
        r"samples: must be what the evidence gives, elsewhere\.jsonl; got \.\./elsewhere\.jsonl",
    )


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
            seen = until(lambda: (evidence / JSON_FILE).is_file())
            time.sleep(0.05 * moment)
            os.kill(process.pid, signal.SIGKILL)
        assert seen and (evidence / JSON_FILE).read_bytes() == wanted
        assert verify(evidence).made_at == "2030-01-02 04:00:00 UTC"
    refresh(evidence)
    assert not list(evidence.glob("*.partial"))


def until(happens: Callable[[], bool], *, seconds: float = 60) -> bool:
    """Wait for something; False if it does not happen."""
    deadline = time.monotonic() + seconds
    while not happens():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True
