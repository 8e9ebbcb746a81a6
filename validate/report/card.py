"""The model card of a checkpoint NAME, in the folder NAME.card: made from its evidence and its
record alone.

In: a checkpoint folder with NAME.report. Out: a folder of what is uploaded with the checkpoint's
own files:

    README.md       front matter for the Hub, then `card_page.page`
    acceptance.png  where there is something to draw
    report.json     the whole evidence, with folders shortened to their last name
    report.html     README.md for a browser

Easy to get wrong: somebody changes a number after it was measured. A report that differs from its
result files makes no card, and a card that differs from what its report makes is refused.
"""

import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...checkpoints.dialects.choose import attention_backends
from ...checkpoints.files import complete, partial_path, refuse_strange, remove, sync, within
from ...checkpoints.identity import identify, refuse_other_bytes
from ...checkpoints.json_file import read_bytes_of
from ...checkpoints.record import RECORD, Record, read_record
from ...checkpoints.source import open_source, view_of
from ...recipes.errors import CheckpointError, RecipeError
from ...recipes.extras import require_extra
from ...recipes.frozen import Bar, Raw
from ..facts.results import report_folder
from ..facts.schema import FullReport
from ..measure.cures import by_version, needed
from ..measure.harness import has_template
from ..measure.serve_line import method_words
from ..measure.tool_calls import parser_words
from . import report as reports
from .base_model import NO_BASE_MODEL, BaseModel, base_model_of, refuse_no_id, unknown
from .card_metadata import README, front_matter, metadata_of, read_front_matter
from .card_page import PICTURE, CardFacts, page
from .html import page_of
from .markdown import code
from .provenance import groups_of, recipe_text

FILES = (
    README,
    PICTURE,
    "speed.png",  # of a card from before
    reports.JSON_FILE,
    "report.html",
)
"""Everything that a card folder may hold."""
_OF_OTHERS = (
    "A card is for what `keepmtp quantize` made: upload any other checkpoint, also one of fix, "
    "with `hf upload ORG/NAME FOLDER`, and let `keepmtp check ORG/NAME` judge it there"
)


def card_folder(checkpoint: Path) -> Path:
    """The folder of a checkpoint's card: `NAME.card`, next to NAME."""
    return report_folder(checkpoint).with_suffix(".card")


def build(
    checkpoint: Path,
    *,
    source: Path | None = None,
    base_model: str | None = None,
    license_id: str | None = None,
    out: Path | None = None,
    watch: Bar | None = None,
) -> tuple[Path, FullReport]:
    """Write a checkpoint's card, replacing an older one.

    Args:
        checkpoint: its evidence is in NAME.report.
        source: what it was made from, where that is here: its own card gives license, language and
            task.
        base_model: Hub id, or `none`; default what was read from the Hub.
        license_id: the license's name on the Hub; default the source's.
        out: folder; default `card_folder`.
        watch: a progress bar, where the checkpoint's bytes have to be read again.

    Returns: the folder, and the report the card was made from.

    Raises:
        CheckpointError: no evidence, or evidence that differs from its report or is about other
            bytes; or no base model that is known or named.
        RecipeError: the `report` extra is missing, or a choice does not have the Hub's form.
    """
    require_extra("keepmtp card", "report")
    refuse_no_id(base_model)
    folder = out or card_folder(checkpoint)
    for place in (folder, partial_path(folder)):
        _refuse_strange(place)
    report = reports.of_checkpoint(checkpoint)
    if report.identity is not None:
        found = identify(checkpoint, cache=report_folder(checkpoint), watch=watch)
        refuse_other_bytes(checkpoint, report.identity, found)
    record = recorded(checkpoint)
    base = base_model_of(record, base_model)
    if base is None:
        raise unknown(checkpoint, f"the local folder {record.source.name}")
    front = {}
    if source:
        front = read_front_matter(source)
    facts = _facts(checkpoint, report, base, front, license_id)
    files = _files(facts)
    # A reader never finds a mixture of the old card and the new one.
    partial = partial_path(folder)
    remove(partial)
    try:
        for name, content in files.items():
            path = within(partial, name)
            path.write_bytes(content)
            sync(path)
        remove(folder)
        complete(folder)
    finally:
        remove(partial)
    return folder, facts.report


def recorded(checkpoint: Path) -> Record:
    """The record of a checkpoint that keepmtp quantized: no measurement gives another one a card.

    Raises:
        CheckpointError: no keepmtp.json of keepmtp's.
    """
    return read_record(checkpoint / RECORD, cure=_OF_OTHERS)


def refuse_none(folder: Path, checkpoint: Path) -> None:
    """Refuse a folder without a card.

    Raises:
        CheckpointError: no README.md in it.
    """
    if not (folder / README).is_file():
        raise CheckpointError(
            folder,
            "must hold the checkpoint's card",
            got=f"no {README}",
            cure=f"Run `keepmtp card {shlex.quote(str(checkpoint))}`",
        )


def verified_files(checkpoint: Path, *, repository: str = "") -> dict[str, bytes]:
    """Name -> bytes of a checkpoint's card, once every file of it is compared with what the
    evidence makes. The checkpoint's own bytes are not hashed; an upload does that after it.

    With `repository`, the commands in README.md name it.

    Raises:
        CheckpointError: no card, or a file of it that differs.
    """
    require_extra("keepmtp card", "report")
    folder = card_folder(checkpoint)
    cure = f"Run `keepmtp card {shlex.quote(str(checkpoint))}` again"
    refuse_none(folder, checkpoint)
    # License, language, task and base model are taken as the card has them: nobody measured them.
    report = reports.of_checkpoint(checkpoint)
    front = read_front_matter(folder)
    stated = None
    if front.get("base_model"):
        stated = str(front["base_model"])
    refuse_no_id(stated)
    base = base_model_of(recorded(checkpoint), stated)
    if base is None or base.name != (stated or ""):
        base = NO_BASE_MODEL
    facts = _facts(checkpoint, report, base, front)
    wanted = _files(facts)
    paths = [path for path in folder.rglob("*") if not path.is_dir()]
    found = {path.relative_to(folder).as_posix(): path for path in paths}
    wrong = dict.fromkeys(found.keys() - wanted.keys(), "a file that the report does not make")
    for name, content in wanted.items():
        if name not in found:
            wrong[name] = "no such file"
        elif read_bytes_of(found[name], found[name]) != content:
            wrong[name] = "another text or drawing"
    for name, got in sorted(wrong.items()):
        raise CheckpointError(
            folder / name, "a card holds what its report makes", got=got, cure=cure
        )
    if repository:
        wanted[README] = _readme(replace(facts, repository=repository))
    return wanted


def _facts(
    checkpoint: Path,
    report: FullReport,
    base: BaseModel,
    front: Raw,
    license_id: str | None = None,
) -> CardFacts:
    """What a card is made from, whose repository is not known; `front` states license, language and
    task.
    """
    from .charts import acceptance  # matplotlib, once it is known to be there

    report = portable(report)
    opened = open_source(checkpoint)
    record = recorded(checkpoint)
    parsers = list[str]()
    if report.target is None and has_template(opened, ()):  # of a draft, its target says it
        parsers += parser_words(opened, ())
        thoughts = view_of(opened).family.reasoning_parser
        if thoughts:
            parsers += ["--reasoning-parser", thoughts]
    return CardFacts(
        name=checkpoint.resolve().name,
        report=report,
        record=record,
        recipe=recipe_text(checkpoint),
        groups=groups_of(opened, record),
        base_model=base,
        repository="",
        metadata=metadata_of(opened, front, license_id=license_id, base_model=base.name),
        drafting=method_words(opened),
        attention=attention_backends(opened.config),
        cures=needed(opened, report.vllm),
        cured=tuple(by_version(opened)),
        chart=acceptance(report),
        parsers=code(" ".join(parsers)),
    )


def _files(facts: CardFacts) -> dict[str, bytes]:
    """Name -> bytes of everything in a card folder."""
    pictures = dict[str, bytes]()
    if facts.chart:
        pictures[PICTURE] = facts.chart.png
    browsed = page_of(_text(facts), heading=facts.name, pictures=pictures)
    return {
        README: _readme(facts),
        reports.JSON_FILE: reports.text_of(facts.report).encode(),
        "report.html": browsed.encode(),
        **pictures,
    }


def _readme(facts: CardFacts) -> bytes:
    return f"---\n{front_matter(facts)}\n---\n\n{_text(facts)}".encode()


def _text(facts: CardFacts) -> str:
    return shortened(page(facts))


def _refuse_strange(folder: Path) -> None:
    """Refuse to replace a folder that holds anything but a card."""
    refuse_strange(folder, below=True)
    for path in (folder, *folder.rglob("*")):
        is_card = path.is_dir() or path.relative_to(folder).as_posix() in FILES
        if path.exists() and not is_card:
            raise RecipeError(
                folder,
                "must be a card's folder, or not there",
                got=path,
                cure="Choose another --out, or move it",
            )


# Not after a letter, which is a relative path, nor after a slash or colon, which is an address; not
# a server's /v1/.
_PATH = re.compile(r"(?<![\w/:.~-])/(?!v1/)(?:[^\s/'\"`,;:()<>|]+/)+(?=[^\s/'\"`,;:()<>|])")
# The folder of a field that is a path, in JSON.
_FOLDER = re.compile(r'"(?:path|log|samples)": "(/[^"]+/)')


def portable(report: FullReport) -> FullReport:
    """The report without this machine's folders; equal reports give equal ones."""
    content = report.model_dump(mode="json", by_alias=True)
    # A folder may have a space in its name. So those of the report's own paths are removed first,
    # whatever their names are; after that, only slashes show what is a path.
    folders = set(_FOLDER.findall(reports.text_of(report)))
    # A folder within another one goes first.
    return FullReport.model_validate(_walk(content, sorted(folders, reverse=True)))


def shortened(text: str, folders: Sequence[str] = ()) -> str:
    """Text whose absolute paths are their last name; `folders`, with a slash at their ends, are
    removed first.
    """
    for folder in folders:
        text = text.replace(folder, "")
    return _PATH.sub("", text)


def _walk(value: Any, folders: Sequence[str]) -> Any:
    if isinstance(value, dict):
        return {key: _walk(inner, folders) for key, inner in value.items()}
    if isinstance(value, list):
        return [_walk(inner, folders) for inner in value]
    if isinstance(value, str):
        return shortened(value, folders)
    return value
