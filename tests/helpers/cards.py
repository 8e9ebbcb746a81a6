"""Quantized checkpoints with all their evidence beside them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import measured
import reports
import yaml
from keepmtp import pipeline
from keepmtp.checkpoints.identity import identify
from keepmtp.checkpoints.source import open_source
from keepmtp.recipes.find import find_recipe
from keepmtp.validate.check.check import examine
from keepmtp.validate.check.pair import as_of_draft, with_draft
from keepmtp.validate.dryload.check_on import with_loads
from keepmtp.validate.facts.dry_load import LoadAccount
from keepmtp.validate.facts.results import CheckData, report_folder
from keepmtp.validate.measure.harness import Model
from keepmtp.validate.report import card
from keepmtp.validate.report import report as full_reports
from keepmtp.validate.report.check_data import check_data

RECIPE = "tiny-glm4-moe.nvfp4a16-fp8"
STATIONS = frozenset({"check", "serve", "eval"})


def checkpoint(folder: Path, recipe: str = RECIPE, **choices: Any) -> Path:
    """A checkpoint as `keepmtp quantize` leaves it."""
    made, text = pipeline.plan_for(recipe, source=str(reports.MODEL), **choices)
    pipeline.quantize(made, text, out=folder)
    return folder


def green(parent: Path) -> Path:
    """A checkpoint in five shards with report and card, ready to publish; gates as lax as its 60
    questions need.
    """
    folder = parent / "tiny.nvfp4a16-fp8"
    recipe = yaml.safe_load(find_recipe(RECIPE)[1]) | {"gates": measured.LAX}
    path = parent / f"{RECIPE}.yaml"
    path.write_text(yaml.safe_dump(recipe))
    plan, text = pipeline.plan_for(str(path), source=str(reports.MODEL))
    pipeline.quantize(replace(plan, shard_bytes=1 << 20), text, out=folder)
    evidence(folder)
    card.build(folder)
    return folder


def draft(folder: Path) -> Path:
    """A draft of its own, measured with the model that it was made from; its card is not made."""
    model = str(reports.MODEL)
    plan, text = pipeline.plan_for(model, draft_for=model, mtp="bf16")
    pipeline.quantize(plan, text, out=folder)
    where, identity = report_folder(folder), identify(folder)
    opened = open_source(model)
    target = Model(role="checkpoint", source=opened, identity=identify(reports.MODEL)).as_target
    pair = with_loads(with_draft(examine(model), examine(folder)), [reports.account("sm90", 1)])
    own = as_of_draft(pair, target)
    data = check_data(own.data, own.source)
    serve = reports.accepting(18_000, 18_000, 20_000)
    for fact in (data, serve):
        measured.write(where, fact, identity, target=target)
    full_reports.refresh(where)
    return folder


def evidence(
    folder: Path,
    *,
    stations: frozenset[str] = STATIONS,
    answers: measured.Answers = measured.ANSWERS,
    is_copy: bool = False,
) -> Path:
    """Results of these stations for the checkpoint in `folder`; returns its evidence folder,
    report.json in it.
    """
    where, identity = report_folder(folder), identify(folder)
    data = checked(folder, reports.account("sm90", 1), reports.account("sm100", 4))
    measured.write(where, data, identity)
    if "serve" in stations:
        measured.write(where, reports.served(is_copy=is_copy), identity)
    if "eval" in stations:
        asked = measured.asked(where, identity.sha256, answers)
        measured.write(where, asked, identity, made_at=measured.ASKED_AT)
    full_reports.refresh(where)
    return where


def checked(folder: Path, *loads: LoadAccount) -> CheckData:
    """The static check of a checkpoint, with a warning and these dry loads."""
    source = open_source(reports.MODEL)
    found = with_loads(examine(str(folder), source=source), loads)
    data = found.data.model_copy(update={"findings": (*found.data.findings, reports.WARNED)})
    return check_data(data, found.source)


def edit(path: Path, old: str, new: str) -> None:
    """Replace a text in a file, once; it is there."""
    text = path.read_text()
    assert old in text, f"{path.name} has no {old}"
    path.write_text(text.replace(old, new, 1))
