"""The model card of a checkpoint NAME, in the folder NAME.card: made from its evidence and its record alone.

In: a checkpoint folder with NAME.report. Out: a folder of what is uploaded with the checkpoint's own files:

    README.md                   front matter for the Hub, then `card_page.page`
    acceptance.png, gsm8k.png   where there is something to draw, as speed.png
    report.json, report.html    the whole evidence, with folders of this machine shortened to their last name
    .eval_results/TASK.yaml     a score that belongs on its benchmark's leaderboard: GSM8K's, MMLU-Pro's, GPQA Diamond's

Easy to get wrong: somebody changes a number after it was measured. A report that differs from its result files makes no
card, and a card that differs from what its report makes is refused.
"""

import json
import os
import re
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

from ...checkpoints.files import complete, partial_path, sync, within
from ...checkpoints.identity import ReadingBar, identify, refuse_other_bytes
from ...checkpoints.json_file import read_bytes_of
from ...checkpoints.record import RECORD, Record, read_record
from ...checkpoints.source import Source, open_source
from ...recipes.errors import CheckpointError, RecipeError
from ...recipes.extras import require_extra
from ..facts.results import report_folder
from ..facts.schema import FullReport
from . import html as report_html
from . import report as reports
from .base_model import NO_BASE_MODEL, NONE, BaseModel, base_model_of, refuse_no_id, unknown
from .card_metadata import (
    BENCHMARKS,
    HUB_ID,
    INHERITED,
    README,
    Metadata,
    eval_results,
    front_matter,
    metadata_of,
    off_leaderboard,
    read_front_matter,
)
from .card_page import CardFacts, page
from .headline import counts_bench
from .portable import portable, shortened
from .provenance import choices, groups_of, recipe_text
from .usage import usage_of

EVAL_RESULTS = tuple(f".eval_results/{task}.yaml" for task in BENCHMARKS)
_PICTURES = ("acceptance.png", "gsm8k.png", "speed.png")
FILES = (README, *_PICTURES, reports.JSON_FILE, report_html.HTML_FILE, *EVAL_RESULTS)
"""Everything that a card folder may hold."""
_SHOWN = 160
_OF_OTHERS = (
    "A card is for what `keepmtp quantize` made: upload any other checkpoint, also one of fix, graft or convert, with "
    "`hf upload ORG/NAME FOLDER`, and let `keepmtp check ORG/NAME` judge it there"
)
_SERVED = re.compile(r"^vllm serve (\S+)", re.MULTILINE)


def card_folder(checkpoint: Path) -> Path:
    """The folder of a checkpoint's card: `NAME.card`, next to NAME."""
    whole = Path(os.path.realpath(checkpoint))  # `resolve` raises on a link to itself
    return whole.with_name(f"{whole.name}.card")


def build(
    checkpoint: Path,
    *,
    source: Path | None = None,
    base_model: str | None = None,
    license_id: str | None = None,
    out: Path | None = None,
    watch: ReadingBar | None = None,
) -> tuple[Path, FullReport]:
    """Write a checkpoint's card, replacing an older one.

    Args:
        checkpoint: its evidence is in NAME.report.
        source: what it was made from, where that is here: its own card gives license, language and task.
        base_model: Hub id, or `none`; default what was read from the Hub.
        license_id: the license's name on the Hub; default the source's.
        out: folder; default `card_folder`.
        watch: a progress bar, where the checkpoint's bytes have to be read again.

    Returns: the folder, and the report the card was made from.

    Raises:
        CheckpointError: no evidence, or evidence that differs from its report or is about other bytes; or no base model
            that is known or named.
        RecipeError: the `report` extra is missing, or a choice does not have the Hub's form.
    """
    require_extra("keepmtp card", "report")
    refuse_no_id(base_model)
    folder = out or card_folder(checkpoint)
    for place in (folder, *_around(folder)):
        _refuse_strange(place)
    told, opened = _verified(checkpoint, watch)
    record = read_record(checkpoint / RECORD, cure=_OF_OTHERS)
    base = base_model_of(record, base_model)
    if base is None:
        raise unknown(checkpoint, f"the local folder {record.source.name}")
    theirs = read_front_matter(source) if source else {}
    inherited = {key: theirs.get(key) for key in INHERITED}
    where = source / README if source else "keepmtp card"
    metadata = metadata_of(opened, inherited, {"license": license_id}, base_model=base.name, where=where)
    _write(folder, _files(_facts(checkpoint, told, opened, record, metadata, base), metadata))
    return folder, told


def refuse_no_record(checkpoint: Path) -> None:
    """Refuse a checkpoint that keepmtp did not quantize: no measurement gives it a card.

    Raises:
        CheckpointError: no keepmtp.json of keepmtp's.
    """
    read_record(checkpoint / RECORD, cure=_OF_OTHERS)


def refuse_none(folder: Path, checkpoint: Path) -> None:
    """Refuse a folder without a card.

    Raises:
        CheckpointError: no README.md in it.
    """
    if not (folder / README).is_file():
        cure = f"Run `keepmtp card {shlex.quote(str(checkpoint))}`"
        raise CheckpointError(folder, "must hold the checkpoint's card", got=f"no {README}", cure=cure)


def verify(checkpoint: Path, *, out: Path | None = None) -> Path:
    """The folder of a checkpoint's card, once every file of it is compared with what the evidence makes.

    Raises:
        CheckpointError: as `verified_files`.
    """
    folder = out or card_folder(checkpoint)
    verified_files(checkpoint, out=folder)
    return folder


def verified_files(checkpoint: Path, *, repository: str = "", out: Path | None = None) -> dict[str, bytes]:
    """Name -> bytes of a checkpoint's card, once every file of it is compared with what the evidence makes.

    License, language, task and base model are taken as the card has them: nobody measured them. With `repository`, the
    commands in README.md name it.

    Raises:
        CheckpointError: no card, or a file of it that differs; names the first line that does.
    """
    require_extra("keepmtp card", "report")
    folder = out or card_folder(checkpoint)
    cure = f"Run `keepmtp card {shlex.quote(str(checkpoint))}` again"
    refuse_none(folder, checkpoint)
    facts, metadata = _stated(checkpoint, folder)
    wanted = _files(facts, metadata)
    found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if not path.is_dir()}
    for name in sorted(wanted.keys() | found.keys()):
        if name not in found or name not in wanted:
            got = "no such file" if name not in found else "a file that the report does not make"
            raise CheckpointError(folder / name, "a card holds what its report makes", got=got, cure=cure)
        if (got := read_bytes_of(found[name], found[name])) != wanted[name]:
            raise _difference(folder / name, got, wanted[name], cure)
    return wanted | ({README: _readme(replace(facts, repository=repository), metadata)} if repository else {})


def _stated(checkpoint: Path, folder: Path) -> tuple[CardFacts, Metadata]:
    """What a card in `folder` is made of: the evidence, with what its own front matter and first command state."""
    told, opened = _verified(checkpoint)
    record, front = read_record(checkpoint / RECORD, cure=_OF_OTHERS), read_front_matter(folder)
    named = str(front.get("base_model") or NONE)
    refuse_no_id(named)
    base = base_model_of(record, None if named == NONE else named)
    if base is None or base.name != ("" if named == NONE else named):
        base = NO_BASE_MODEL
    metadata = metadata_of(opened, front, {}, base_model=base.name, where=folder / README)
    return replace(_facts(checkpoint, told, opened, record, metadata, base), repository=_repository(folder)), metadata


def _repository(folder: Path) -> str:
    """The repository that a card's first command names; "" where its owner is left open."""
    found = _SERVED.search((folder / README).read_text(encoding="utf-8", errors="replace"))
    return found[1] if found and HUB_ID.fullmatch(found[1]) and not found[1].startswith("ORG/") else ""


def _verified(checkpoint: Path, watch: ReadingBar | None = None) -> tuple[FullReport, Source]:
    """The report with shortened paths, if it is what its results make and the checkpoint still is those bytes."""
    if not (checkpoint / "config.json").is_file():
        raise CheckpointError(
            checkpoint, "a card is made of a checkpoint's folder", got="no config.json", cure="Name that folder"
        )
    evidence = report_folder(checkpoint)
    if not (evidence / reports.JSON_FILE).is_file():
        raise CheckpointError(
            evidence,
            "a card is made from the checkpoint's report",
            got=f"no {reports.JSON_FILE}",
            cure=f"Run `keepmtp check {shlex.quote(str(checkpoint))} --record`",
        )
    told = reports.verify(evidence)
    if told.identity is not None:
        refuse_other_bytes(checkpoint, told.identity, identify(checkpoint, cache=evidence, watch=watch))
    return portable(told), open_source(checkpoint)


def _facts(
    checkpoint: Path, report: FullReport, opened: Source, record: Record, metadata: Metadata, base: BaseModel
) -> CardFacts:
    """What a card is made from, whose repository is not known."""
    from . import plots, speed_plots  # matplotlib, once it is known to be there

    others = report.evaluation.tasks if report.evaluation else ()
    drawings = {
        "acceptance.png": plots.acceptance_png(report),
        "gsm8k.png": plots.gsm8k_png(report),
        "speed.png": speed_plots.speed_png(report.bench) if report.bench and counts_bench(report.bench) else None,
    }
    return CardFacts(
        name=checkpoint.resolve().name,
        report=report,
        record=record,
        recipe=recipe_text(checkpoint),
        choices=choices(checkpoint, record),
        groups=groups_of(opened, record),
        base_model=base,
        repository="",
        license=metadata.license_name or metadata.license,
        usage=usage_of(opened, report.facts.family),
        plots={name: drawing for name, drawing in drawings.items() if drawing},
        off_leaderboard=off_leaderboard(report.evaluation) if report.evaluation else "",
        others_off_leaderboard=tuple(
            f"{task.protocol.title}: {why}" for task in others if (why := off_leaderboard(task))
        ),
    )


def _files(told: CardFacts, metadata: Metadata) -> dict[str, bytes]:
    """Name -> bytes of everything in a card folder."""
    report = told.report
    text = json.dumps(report.model_dump(mode="json", by_alias=True), indent=2, ensure_ascii=False) + "\n"
    files = {
        README: _readme(told, metadata),
        reports.JSON_FILE: text.encode(),
        report_html.HTML_FILE: report_html.render(report).encode(),
        **told.plots,
    }
    return files | {name: text.encode() for name, text in eval_results(report).items()}


def _readme(told: CardFacts, metadata: Metadata) -> bytes:
    return f"---\n{front_matter(told, metadata)}\n---\n\n{shortened(page(told))}".encode()


def _difference(path: Path, got: bytes, wanted: bytes, cure: str) -> CheckpointError:
    """A refusal that names the first line that differs, or the file if it has no lines."""
    if path.suffix == ".png":
        return CheckpointError(path, "must be the drawing that the report makes", got="another", cure=cure)
    lines = zip_longest(got.decode(errors="replace").split("\n"), wanted.decode().split("\n"), fillvalue="nothing")
    number, (told, right) = next((number, pair) for number, pair in enumerate(lines, start=1) if pair[0] != pair[1])
    at = next((at for at, (one, other) in enumerate(zip_longest(told, right)) if one != other), 0)
    start = max(0, at - _SHOWN // 2)
    told, right = (f"{'...' * bool(start)}{line[start : start + _SHOWN]}" for line in (told, right))
    rule = f"must be as the report makes it, {right!r}"
    return CheckpointError(f"{path}: line {number}", rule, got=repr(told), cure=cure)


def _refuse_strange(folder: Path) -> None:
    """Refuse to replace a folder that holds anything but a card."""
    strange = [
        path for path in folder.rglob("*") if not path.is_dir() and path.relative_to(folder).as_posix() not in FILES
    ]
    if strange or (folder.exists() and not folder.is_dir()):
        got = strange[0] if strange else "a file"
        raise RecipeError(
            folder, "must be a card's folder, or not there", got=got, cure="Choose another --out, or move it away"
        )


def _around(folder: Path) -> tuple[Path, Path]:
    """The folder of the unfinished card, and that of the card which it replaces."""
    return partial_path(folder), folder.with_name(f"{folder.name}.old")


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write a folder so that a reader finds the old card or the new one, never a mixture."""
    partial, old = _around(folder)
    for left in (partial, old):
        if left.exists():
            shutil.rmtree(left)
    for name, content in files.items():
        path = within(partial, name)
        path.write_bytes(content)
        sync(path)
    if folder.exists():
        os.rename(folder, old)
    complete(folder)
    if old.exists():
        shutil.rmtree(old)
