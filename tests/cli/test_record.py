"""`check --record` and `report` on an evidence folder, as people type them."""

import json
import os
import shutil
from pathlib import Path

import cards
import measured
import pytest
import reports
from commands import keepmtp, make, ran, refused
from data_files import json_of, put_json
from keepmtp import api
from keepmtp.checkpoints.identity import CACHE, identify
from keepmtp.checkpoints.source import open_source
from keepmtp.checkpoints.source_of import recorded_source
from keepmtp.cli.session import recorder
from keepmtp.recipes.errors import RecipeError
from keepmtp.validate.facts.results import read_result, report_folder
from keepmtp.validate.report.report import JSON_FILE, read_json, verify


@pytest.fixture
def folder(tmp_path) -> Path:
    return measured.checkpoint(tmp_path / "out" / "glm.nvfp4")


def test_a_check_is_kept_with_the_bytes_it_is_about(folder, tmp_path):
    done = keepmtp("check out/glm.nvfp4 --record --json", cwd=tmp_path, status=0)
    assert json.loads(done.stdout)["ok"], "standard output is as without --record"
    evidence = report_folder(folder)
    assert str(evidence / JSON_FILE) in done.stderr.replace("\n", "")
    found = read_result(evidence, "check")
    assert found is not None and found.checkpoint == identify(folder)
    assert found.data.path == "out/glm.nvfp4" and found.data.findings == ()
    full = verify(evidence)
    assert full.identity == found.checkpoint
    assert full.judgement is not None and full.judgement.verdict == "infeasible"
    names = {path.name for path in evidence.iterdir()}
    assert names <= {"check.json", JSON_FILE, CACHE}
    assert read_json(evidence / JSON_FILE) == full


def test_make_check_keeps_the_check_of_a_folder(folder):
    """A repository has no folder for results."""
    for out, is_kept in ((folder, True), ("org/name", False)):
        words = ("--no-print-directory", "-n", "-o", ".venv/.base", "check", f"OUT={out}")
        said = make(*words).stdout
        assert f'check "{out}"' in said and ("--record" in said) == is_kept


def test_a_draft_is_measured_with_its_target(tmp_path, serve_hub):
    """Its evidence is its own, and names the target and its commit; alone, it is refused."""
    made = cards.draft(tmp_path / "draft")
    shutil.rmtree(report_folder(made))
    served = f"Use `keepmtp eval TARGET --draft {made}`"
    for verb in ("eval", "bench"):
        refused(f"{verb} {made} --source none", says=f"got a draft alone. {served}")
    cure = f"Run `keepmtp eval TARGET --draft {made}` and card."
    for verb in (
        f"card {made}",
        f"publish {made} --repo org/draft --dry-run",
        f"eval {made} --only gates",
    ):
        assert cure in keepmtp(verb, status=2).stderr
    serve_hub(reports.MODEL)
    keep = recorder(["org/model"], str(made))
    (pair,) = api.check_all(["org/model"], draft=str(made))
    keep(pair)
    found = read_result(report_folder(made), "check")
    assert found is not None and found.checkpoint == identify(made) and not found.data.findings
    target = found.data.target
    assert target is not None and target.path == "org/model" and len(target.revision) == 40
    assert found.data.facts.num_mtp_tensors == found.data.facts.num_tensors == 34


def test_a_checkpoint_with_errors_has_a_record_too(folder):
    """Exit status 1, and the report says why."""
    config = json_of(folder / "config.json")
    put_json(folder / "config.json", config | {"num_nextn_predict_layers": 0})
    ran(f"check {folder} --record", status=1)
    full = verify(report_folder(folder))
    assert full.judgement is not None and full.judgement.verdict == "regression"


def test_the_source_is_a_folder_with_the_recorded_files(folder, tmp_path):
    source = measured.checkpoint(tmp_path / "GLM", record={})
    files = {path.name: path.stat().st_size for path in source.iterdir()}
    record = measured.recorded(made_from={"name": "GLM", "files": files}, source=str(source))
    put_json(folder / "keepmtp.json", record)
    assert recorded_source(open_source(folder), cure="Name it") == str(source)
    os.truncate(source / "config.json", 10)
    with pytest.raises(RecipeError, match=r"no folder with the recorded files here\. Name it\.$"):
        recorded_source(open_source(folder), cure="Name it")
