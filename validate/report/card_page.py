"""README.md below its front matter: what a model card says, from report.json, keepmtp.json and
recipe.yaml alone.

In: a `CardFacts`. Out: Markdown. Needs the `report` extra (jinja2). The sentences are in
templates/card.md.j2; the rows of its tables are those of the page (tables.py).

Easy to get wrong: a card may only have numbers of the report, and numbers computed from them.
"""

import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ...checkpoints.record import Record
from ...recipes.schemes import SCHEMES
from ..facts.benched import BenchFact
from ..facts.schema import FullReport
from ..measure.serve_line import docker_words, serve_words
from ..measure.texts import SHIPPED
from . import hardware, tables
from .base_model import BaseModel
from .best_k import BestK, best_k_of_report
from .card_limits import limitations
from .drafted import counts_bench, drafted
from .leaderboard import off_leaderboard
from .markdown import Md, bare, code, fenced, finalize, quoted, ticked
from .provenance import ModuleGroup
from .template import template
from .usage import Usage

MAX_COLUMNS = 76
"""The Hub's page cuts longer lines of code, or hides their ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metadata:
    """What the front matter says and nobody measured; "" or () where it is not known."""

    base_model: str = ""
    license: str = ""
    license_name: str = ""
    license_link: str = ""
    pipeline_tag: str = ""
    language: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CardFacts:
    """Everything a card is made from.

    Attributes:
        name: of the checkpoint's folder.
        report: with paths of the machine already shortened.
        record, recipe: keepmtp.json and recipe.yaml.
        changed: the first key of recipe.yaml that the run had otherwise; "" where it had none.
        groups: what is in the checkpoint.
        base_model: its Hub id, and how that is known.
        repository: where it is published; "" where that is not known yet.
        metadata: of the front matter.
        plots: the card's drawings, by name.
        usage: what its own files say to the person who serves it.
    """

    name: str
    report: FullReport
    record: Record
    recipe: str
    changed: str
    groups: tuple[ModuleGroup, ...]
    base_model: BaseModel
    repository: str
    metadata: Metadata
    plots: Mapping[str, bytes]
    usage: Usage

    @property
    def model(self) -> str:
        """What a reader names to serve it."""
        return self.repository or f"ORG/{self.name}"

    @property
    def best_k(self) -> BestK:
        """How many tokens to draft in a step, and why; 0 serves without drafting."""
        return best_k_of_report(self.report)

    def schemes(self, *parts: str) -> tuple[str, ...]:
        """Of the tensors on disk in these parts, all by default; in the order of the table of
        schemes.
        """
        used = {
            scheme
            for group in self.groups
            if group.part in (parts or (group.part,))
            for scheme in group.schemes
        }
        return (*(name for name in SCHEMES if name in used), *sorted(used - SCHEMES.keys()))


def page(told: CardFacts) -> str:
    """The card's text. Equal values give equal bytes."""
    report = told.report
    filters = {each.__name__: each for each in (code, codes, ticked, quoted, fenced, bare, Md)}
    measured = drafted(report.serve, report.evaluation)
    k = told.best_k.k
    return template("card.md.j2", finalize=finalize, filters=filters, markup=Md).render(
        told=told,
        report=report,
        record=told.record,
        tables=tables,
        wanted=tables.wanted_filter(report),
        sizes={(row.part, row.group): row for row in report.sizes},
        hardware=hardware.where_they_run(told.schemes()),
        read_from=hardware.READ_FROM,
        serve_command=shell(serve_words(told.model, k)),
        docker_command=shell(docker_words(told.model, k, version=report.vllm)),
        drafted=next((each for each in measured if each.checkpoint.drafts), None),
        bench=report.bench if report.bench and counts_bench(report.bench) else None,
        off_leaderboard=off_leaderboard(report.evaluation) if report.evaluation else "",
        limitations=list(limitations(report, told.record)),
        extra="calibrate" if report.calibration else "quantize",
        commands=list(_commands(told)),
    )


def shell(words: Iterable[str]) -> Md:
    """A command that a narrow column does not cut: on one line, or an option with its value on
    each.

    A word that would make its line too long begins another one.
    """
    quoted = [bare(shlex.quote(word)) for word in words]
    if len(" ".join(quoted)) <= MAX_COLUMNS:
        return Md(" ".join(quoted))
    lines = [""]
    for word in quoted:
        if word.startswith("-") or len(f"{lines[-1]} {word}") > MAX_COLUMNS:
            lines.append(word)
        else:
            lines[-1] = f"{lines[-1]} {word}".strip()
    return Md(" \\\n  ".join(lines))


def codes(words: Iterable[str]) -> Md:
    """Names, each as code."""
    return Md(", ".join(map(code, words)))


def _commands(told: CardFacts) -> Iterator[Md]:
    """The commands that repeat the run and its measurements.

    None installs keepmtp: the package index does not have it, so anybody could take its name there.
    """
    report, out, base = told.report, told.name, told.base_model
    source = ["--source", base.name if base.is_proven else told.record.source.name]
    block = ["--mtp-source", told.record.mtp_source.name] if told.record.mtp_source else []
    yield shell(["keepmtp", "quantize", "recipe.yaml", *source, *block, "--out", out])
    pretended = [
        word for gpu in dict.fromkeys(load.gpu for load in report.dry) for word in ("--gpu", gpu)
    ]
    pretended += [
        word for tp in dict.fromkeys(load.tp for load in report.dry) for word in ("--tp", str(tp))
    ]
    yield shell(["keepmtp", "check", out, "--record", *pretended])
    if report.serve:
        most = max((run.k for run in report.serve.checkpoint.runs), default=1)
        yield shell(["keepmtp", "serve-check", out, *source, "-k", str(max(1, most))])
    if report.evaluation:
        yield shell(["keepmtp", "eval", out, *source])
    if report.bench:
        yield shell(
            [
                "keepmtp",
                "bench",
                out,
                *(source if report.bench.source else ()),
                *_bench_words(report.bench),
            ]
        )
    stated = ["--base-model", base.name] if base.name and not base.is_proven else []
    yield shell(["keepmtp", "card", out, *stated])


def _bench_words(bench: BenchFact) -> Iterator[str]:
    """The options that ask the same matrix again; the prompts of others are named by their file."""
    in_flight = sorted({cell.concurrency for cell in bench.checkpoint.cells})
    yield from ("-k", ",".join(map(str, tables.ks_of(bench))))
    yield from ("--concurrency", ",".join(map(str, in_flight)))
    if bench.prompts != Path(SHIPPED).name:
        yield from ("--prompts", bench.prompts)
