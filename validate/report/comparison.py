"""`keepmtp compare`: finished checkpoints of one model, next to each other.

In: folders and Hub ids. Out: a `Comparison`, and tables with a column for each checkpoint. Headers
are read, and the reports that are there. It needs no GPU and no server.

Easy to get wrong: figures of a report are of the servers that gave them. They are shown next to
each other, and no difference between them is judged.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ...checkpoints.dialects.runtime_view import RuntimeView, described
from ...checkpoints.fact import Count, Fact
from ...checkpoints.safetensors_file import total_bytes
from ...checkpoints.source import open_source
from ...checkpoints.source_of import refuse_another_model
from ...recipes.errors import CheckpointError, shortened, size_in_words
from ...recipes.family import QUANTIZABLE_ROLES, TABLE_ROLES
from ...recipes.family_view import Place
from ...recipes.forms import NOT_COMPUTED
from ...recipes.frozen import Say, silent
from ...recipes.runtimes.vllm import KNOWN
from ..check.check import examine
from ..check.rules_kv import is_fp8_cache, kv_entry
from ..facts.findings import CheckpointFacts, errors_of
from ..facts.numbers import percent
from ..facts.schema import FullReport
from . import tables
from .best_k import report_of
from .markdown import Table

_MTP = "MTP block"
_REST = "rest"
GROUPS = (*QUANTIZABLE_ROLES, *TABLE_ROLES, _MTP, "vision", _REST)
"""In the order in which they are shown."""
_LEAST = 0.01  # of a group's bytes: what is less is not in the tables


class ComparedCheckpoint(Fact):
    """One checkpoint.

    Attributes:
        kv_cache: its form.
        stored: group -> scheme, form or dtype -> bytes. Scales are counted with their weights, and
            `rest` is all that has no group.
        verdicts: a vLLM -> the first error of the static check, "" for none.
        report: what was measured on it; None where nothing was, or `unreported` says why.
    """

    path: str
    facts: CheckpointFacts
    kv_cache: str
    stored: Mapping[str, Mapping[str, Count]]
    verdicts: Mapping[str, str]
    report: FullReport | None
    unreported: str


class Comparison(Fact):
    """All of them, in the order in which they were named."""

    checkpoints: tuple[ComparedCheckpoint, ...]


def compare(places: Iterable[str | Path], *, progress: Say = silent) -> Comparison:
    """Lay checkpoints of one model next to each other.

    Args:
        places: folders or Hub ids.
        progress: is called with what is done now.

    Raises:
        KeepMTPError: one cannot be read, has no family's table, or is of another model.
    """
    first = None
    found = []
    for place in places:
        with _telling(str(place)):
            runtime = RuntimeView.of(open_source(place))
            first = first or runtime
            rule = "must be of the model of {}"
            cure = "Compare checkpoints of one model"
            refuse_another_model(first.source, runtime.source, rule=rule, cure=cure)
            found.append(_compared(runtime, progress))
    return Comparison(checkpoints=tuple(found))


@contextmanager
def _telling(place: str) -> Iterator[None]:
    """A refusal that does not begin with the checkpoint gets its name."""
    try:
        yield
    except CheckpointError as error:
        if str(error.where) == place or str(error.where).startswith((f"{place}/", f"{place}:")):
            raise
        raise error.at(place) from error


def _compared(runtime: RuntimeView, progress: Say) -> ComparedCheckpoint:
    opened = runtime.source
    facts = examine(opened).data.facts
    verdicts = {}
    progress(f"{opened.where}: judging it by each vLLM's rules")
    for version in KNOWN:
        says = ""
        for error in errors_of(examine(opened, vllm=version).data.findings)[:1]:
            says = f"{error.where}: {error.says}"
        verdicts[f"vLLM {version}"] = says
    report, doubt = report_of(opened)
    return ComparedCheckpoint(
        path=opened.where,
        facts=facts,
        kv_cache=_kv_cache(runtime),
        stored=_stored(runtime),
        verdicts=verdicts,
        report=report,
        unreported=doubt.removeprefix("; "),
    )


def _kv_cache(runtime: RuntimeView) -> str:
    _, form = kv_entry(runtime)
    if is_fp8_cache(runtime):
        form = "FP8"
    if not form:
        form = "not quantized"
    return shortened(str(form), 40)


def _stored(runtime: RuntimeView) -> dict[str, Counter[str]]:
    """Every tensor of every file, those that the index does not list included."""
    stored: dict[str, Counter[str]] = defaultdict(Counter)
    others = (*runtime.others, *runtime.source.unindexed.values())
    for weight in (*runtime.weights.values(), *map(described, others)):
        word = weight.form
        if word not in NOT_COMPUTED:
            word = runtime.schemes.get(weight.module) or word
        group = stored[group_of(runtime.placed.get(weight.module))]
        group[word.replace("plain", weight.weight.dtype)] += total_bytes(weight.parts.values())
    return stored


def group_of(place: Place | None) -> str:
    """The group of a tensor; None is the place of one that the family does not know."""
    if place is None:
        return _REST
    if place.part == "mtp":
        return _MTP
    if place.role in GROUPS:
        return place.role
    return _REST


# --- how it is shown ------------------------------------------------------------------------------


def numbered(found: Comparison) -> dict[str, ComparedCheckpoint]:
    """The checkpoints by their numbers."""
    return {f"{number}": one for number, one in enumerate(found.checkpoints, 1)}


def sections(found: Comparison) -> Iterator[tuple[str, Table]]:
    """Tables with their titles; the numbers of the checkpoints are the heads of their columns."""
    columns = numbered(found)
    for heading, cells_of in _SECTIONS.items():
        rows = dict[str, list[str]]()
        for number, one in enumerate(columns.values()):
            for name, words in cells_of(one).items():
                rows.setdefault(name, ["-"] * len(columns))[number] = words
        if rows:
            lines = [(name, *cells) for name, cells in rows.items()]
            yield heading, Table(columns=("", *columns), rows=lines)


def _facts(one: ComparedCheckpoint) -> dict[str, str]:
    num_bytes = 0
    for group in one.stored.values():
        num_bytes += sum(group.values())
    facts = {
        "path": one.path,
        "size": size_in_words(num_bytes),
        "dialect": one.facts.dialect,
        "MTP layers": f"{one.facts.num_mtp_layers}",
        "KV cache": one.kv_cache,
    }
    for server, error in one.verdicts.items():
        facts[server] = "loads"
        if error:
            facts[server] = "no"
    return facts


def _sizes(one: ComparedCheckpoint) -> dict[str, str]:
    found = {}
    for group in GROUPS:
        forms = Counter(one.stored.get(group, {}))
        words = []
        for word, size in forms.most_common():
            if size >= _LEAST * forms.total():
                words.append(f"{size_in_words(size)} {word}")
        if words:
            found[group.replace("_", " ")] = ", ".join(words)
    return found


def _measured(one: ComparedCheckpoint) -> dict[str, str]:
    report = one.report
    if report is None:
        return {}
    found = {"gates": report.judgement.title}
    for part in report.parts:
        found["served"] = part.checkpoint.as_served
    for row in tables.rows_of(report):
        if row.of == "checkpoint":
            found[row.title] = row.says
    return found


_SECTIONS = {
    "What each is": _facts,
    "Bytes by group and scheme": _sizes,
    "What was measured": _measured,
}


def notes(found: Comparison) -> Iterator[str]:
    """What a reader of the tables should know."""
    for number, one in numbered(found).items():
        for server, error in one.verdicts.items():
            if error:
                yield f"{number} in {server}: {error}."
        if one.unreported:
            yield f"{number} has no figures of servers: {one.unreported}."
    if any(one.report for one in found.checkpoints):
        yield tables.LEGEND
    yield (
        f"Forms with less than {percent(_LEAST, 0)} of a group's bytes are left out. A checkpoint "
        "loads where the static check finds no error by the rules of that version."
    )
