"""Quantized checkpoints with all their evidence beside them, and what a card is made from without
any.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import measured
import reports
import yaml
from keepmtp import pipeline
from keepmtp.checkpoints.identity import identify
from keepmtp.checkpoints.record import RECORD, read_record
from keepmtp.checkpoints.source import Source, open_source
from keepmtp.recipes.find import find_recipe
from keepmtp.validate.check.check import examine
from keepmtp.validate.dryload.check_on import with_loads
from keepmtp.validate.facts.results import CheckData, report_folder, write_result
from keepmtp.validate.facts.schema import FullReport
from keepmtp.validate.report import card
from keepmtp.validate.report import report as full_reports
from keepmtp.validate.report.base_model import NO_BASE_MODEL
from keepmtp.validate.report.card_page import CardFacts, Metadata
from keepmtp.validate.report.check_data import check_data
from keepmtp.validate.report.provenance import groups_of, recipe_text

RECIPE = "tiny-glm4-moe.nvfp4a16-fp8"
STATIONS = frozenset({"check", "serve", "gsm8k"})


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
    source = open_source(reports.MODEL)
    loads = [reports.account("sm90", 1), reports.account("sm100", 4)]
    checked = with_loads(examine(str(folder), source=source), loads, reports.VLLM)
    data = check_data(_warned(checked.data), opened=checked.source, source=source)
    write_result(
        where, "check", data, checkpoint=identity, vllm=reports.VLLM, made_at=measured.SERVED_AT
    )
    if "serve" in stations:
        serve = reports.served(is_copy=is_copy)
        write_result(
            where,
            "serve",
            serve,
            checkpoint=identity,
            vllm=reports.VLLM,
            made_at=measured.SERVED_AT,
        )
    if "gsm8k" in stations:
        asked = measured.asked(where, identity.sha256, answers)
        write_result(
            where, "gsm8k", asked, checkpoint=identity, vllm=reports.VLLM, made_at=measured.ASKED_AT
        )
    full_reports.refresh(where)
    return where


def told(folder: Path, report: FullReport, **changed: Any) -> CardFacts:
    """What a card of the checkpoint in `folder` is made from, with any report; `changed` are fields
    of it.
    """
    record, opened = read_record(folder / RECORD), open_source(folder)
    fields: dict[str, Any] = {
        "name": folder.name,
        "report": report,
        "record": record,
        "recipe": recipe_text(folder),
        "groups": groups_of(opened, record),
        "base_model": NO_BASE_MODEL,
        "repository": "",
        "metadata": Metadata(),
        "plots": {},
        "is_chat": False,
        "gpus": (),
    }
    return CardFacts(**(fields | changed))


def source_with_card(folder: Path, text: str) -> Source:
    """A folder that holds a released checkpoint's card."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "README.md").write_text(text)
    return replace(open_source(reports.MODEL), folder=folder)


def _warned(data: CheckData) -> CheckData:
    return data.model_copy(update={"findings": (*data.findings, reports.WARNED)})
