"""README.md below its front matter: what a model card says, from report.json, keepmtp.json and recipe.yaml alone.

In: a `CardFacts`. Out: Markdown. Needs the `report` extra (jinja2). The sentences are in templates/card.md.j2; the rows
of its tables are made here.

Easy to get wrong: a card may only have numbers of the report, and numbers computed from them.
"""

import shlex
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ...checkpoints.record import Record
from ...recipes.schemes import SCHEMES
from ..dryload.facts import DryLoad, LoadedModel
from ..report.schema import FullReport, GroupSize
from ..serving.served import AsServed, Drafts
from . import hardware
from .card_limits import limitations
from .markdown import Md, bare, code, fenced, finalize, quoted, ticked
from .provenance import ModuleGroup

MAX_PROMPTS = 12
_TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True, slots=True, kw_only=True)
class CardFacts:
    """Everything a card is made from.

    Attributes:
        name: of the checkpoint's folder.
        report: with paths of the machine already shortened.
        record, recipe: keepmtp.json and recipe.yaml.
        choices: the options that make the recorded recipe from recipe.yaml; None where no options do.
        groups: what is in the checkpoint.
        base_model: Hub id; "" where there is none.
        license: its name on the Hub; "" where it is not known.
        plots: names of the card's drawings.
        off_leaderboard: why the score is no entry of the benchmark's leaderboard; "" where it is one.
    """

    name: str
    report: FullReport
    record: Record
    recipe: str
    choices: tuple[str, ...] | None
    groups: tuple[ModuleGroup, ...]
    base_model: str
    license: str
    plots: frozenset[str]
    off_leaderboard: str

    @property
    def schemes(self) -> tuple[str, ...]:
        """Of the tensors on disk, in the order of the table of schemes."""
        return self._schemes({"backbone", "mtp"})

    @property
    def mtp_schemes(self) -> tuple[str, ...]:
        """Of the MTP block."""
        return self._schemes({"mtp"})

    @property
    def num_drafts(self) -> int:
        """How many tokens to draft in a step: as evaluated, else the fastest measured, else one for each MTP layer."""
        if self.report.evaluation:
            return self.report.evaluation.protocol.k
        runs = self.report.serve.checkpoint.drafting if self.report.serve else ()
        fastest = max(runs, key=lambda run: run.speed_up or 0.0, default=None)
        return fastest.k if fastest else max(1, self.report.facts.num_mtp_layers)

    def _schemes(self, parts: set[str]) -> tuple[str, ...]:
        used = {scheme for group in self.groups if group.part in parts for scheme in group.schemes}
        return (*(name for name in SCHEMES if name in used), *sorted(used - SCHEMES.keys()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """A row of the acceptance table: one model under one way of asking."""

    asked: str
    model: str
    k: int
    concurrency: int
    as_served: AsServed
    counted: Drafts
    speed_up: float | None


def page(told: CardFacts) -> str:
    """The card's text. Equal values give equal bytes."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=finalize,
        autoescape=False,  # noqa: S701  `finalize` escapes, for Markdown
    )
    environment.filters |= {
        "code": code,
        "ticked": ticked,
        "quoted": quoted,
        "fenced": fenced,
        "percent": percent,
        "points": points,
        "size": size,
        "count": count,
        "codes": codes,
        "figure": figure,
        "bare": bare,
    }
    report = told.report
    return environment.get_template("card.md.j2").render(
        told=told,
        report=report,
        record=told.record,
        groups=list(_group_rows(told)),
        loads=list(_load_rows(report.dry)),
        hardware=hardware.where_they_run(told.schemes),
        read_from=hardware.READ_FROM,
        max_prompts=MAX_PROMPTS,
        accepted=list(accepted_rows(report)),
        commands=list(_commands(told)),
        address=shlex.quote(f"ORG/{told.name}"),
        limitations=list(limitations(report, told.record, told.off_leaderboard)),
    )


def accepted_rows(report: FullReport) -> Iterator[Accepted]:
    """The rows of GSM8K first, then those of serve-check; the source before the checkpoint."""
    evaluation, serve = report.evaluation, report.serve
    for model in evaluation.evaluated if evaluation else ():
        if evaluation and model.draft_tokens:
            protocol = evaluation.protocol
            asked = f"{protocol.title}, {count(model.num_questions)} questions"
            yield Accepted(
                asked=asked,
                model=model.role,
                k=protocol.k,
                concurrency=protocol.concurrency,
                as_served=model.as_served,
                counted=model,
                speed_up=None,
            )
    for model in serve.served if serve else ():
        for run in model.drafting:
            if serve and run.draft_tokens:
                asked = f"serve-check, {count(len(serve.prompts))} prompts"
                yield Accepted(
                    asked=asked,
                    model=model.role,
                    k=run.k,
                    concurrency=1,
                    as_served=model.as_served,
                    counted=run,
                    speed_up=run.speed_up,
                )


def percent(share: float | None, digits: int = 2) -> Md:
    """A share of one."""
    return Md("-" if share is None else f"{100 * share:.{digits}f} %")


def points(share: float) -> Md:
    """A difference of two shares, in percentage points."""
    return Md(f"{100 * share:+.2f}")


def count(number: int) -> Md:
    """A whole number."""
    return Md(f"{number:,}")


def figure(value: float | None) -> Md:
    """A ratio or a perplexity."""
    return Md("-" if value is None else f"{value:.2f}" if value < 100 else f"{value:.4g}")


def size(num_bytes: int | None) -> Md:
    """Bytes for people, in the unit that leaves two to four digits."""
    if num_bytes is None:
        return Md("-")
    for unit, divisor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= divisor:
            return Md(f"{num_bytes / divisor:,.1f} {unit}")
    return Md(f"{num_bytes} bytes")


def codes(words: Iterable[str]) -> Md:
    """Names, each as code."""
    return Md(", ".join(code(word) for word in words))


def _group_rows(told: CardFacts) -> Iterator[tuple[ModuleGroup, GroupSize | None, str]]:
    """Each group with its bytes and why it is stored as it is."""
    sizes: Mapping[tuple[str, str], GroupSize] = {(row.part, row.group): row for row in told.report.sizes}
    for group in told.groups:
        says = list(group.reasons)
        if group.decision:
            says.insert(0, f"recipe: {group.decision}")
        yield group, sizes.get((group.part, group.modules)), "; ".join(says)


def _load_rows(loads: Iterable[DryLoad]) -> Iterator[tuple[str, str, str, str, str, str]]:
    """(GPU, TP sizes, k, verdict, target's kernels, draft's kernels); TP sizes with the same outcome share a row."""
    found: dict[tuple[str, str, str, str, str], list[str]] = defaultdict(list)
    for load in loads:
        word = "loads" if load.ok else "fails"
        found[load.gpu, str(load.k), word, _kernels(load.target), _kernels(load.draft)].append(str(load.tp))
    for (gpu, k, word, target, draft), tps in found.items():
        yield gpu, ", ".join(tps), k, word, target, draft


def _kernels(model: LoadedModel) -> str:
    """Layers by kernel. A question mark: preparing the weights needs values, and a dry load has none."""
    counts: dict[str, int] = defaultdict(int)
    for use in model.kernels:
        if use.kernel:
            mark = "" if use.outcome == "ok" else " (refused)" if use.outcome.startswith("refused") else " (?)"
            counts[use.kernel.partition(" ")[0] + mark] += use.count
    return ", ".join(f"{number:,} {name}" for name, number in counts.items()) or "-"


def _commands(told: CardFacts) -> Iterator[str]:
    """The commands that repeat the run and its measurements."""
    report, out = told.report, shlex.quote(told.name)
    extras = "calibrate,evaluate" if report.calibration else "quantize,evaluate"
    source = shlex.quote(told.base_model or told.record.source.name)
    yield f"pip install 'keepmtp[{extras}]=={told.record.keepmtp}'"
    words = shlex.join(told.choices or ())
    yield f"keepmtp quantize recipe.yaml --source {source} {words}{' ' * bool(words)}--out {out}"
    pretended = "".join(f" --gpu {gpu}" for gpu in dict.fromkeys(load.gpu for load in report.dry))
    sizes = "".join(f" --tp {tp}" for tp in dict.fromkeys(load.tp for load in report.dry))
    yield f"keepmtp check {out} --record{pretended}{sizes}"
    if report.serve:
        most = max((run.k for run in report.serve.checkpoint.runs), default=1)
        yield f"keepmtp serve-check {out} --source {source} -k {max(1, most)}"
    if report.evaluation:
        yield f"keepmtp eval {out} --source {source}"
    yield f"keepmtp card {out}"
