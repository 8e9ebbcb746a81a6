"""README.md below its front matter: what a model card says, from report.json, keepmtp.json and
recipe.yaml alone.

In: a `CardFacts`. Out: Markdown. Needs the `report` extra (jinja2). The sentences are in
templates/card.md.j2; the rows of its tables are those of the page (tables.py).

Easy to get wrong: a card may only have numbers of the report, and numbers computed from them.
"""

import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePath

from ...checkpoints.record import Record
from ...recipes.frozen import frozen
from ...recipes.runtimes.vllm import KERNELS
from ...recipes.schemes import SCHEMES
from ..facts.dry_load import GPU_NAMES, versions_in_short
from ..facts.schema import FullReport
from ..facts.served import MENDED
from ..measure.serve_line import docker_words, serve_words
from . import tables
from .base_model import BaseModel
from .best_k import BestK, best_k_of_report
from .drafted import counts_bench, drafted
from .provenance import ModuleGroup
from .template import Md, bare, code, fenced, finalize, quoted, template, ticked

MAX_COLUMNS = 76
"""The Hub's page cuts longer lines of code, or hides their ends."""


@frozen
class Metadata:
    """What the front matter says and nobody measured; "" or () where it is not known."""

    base_model: str = ""
    license: str = ""
    license_name: str = ""
    license_link: str = ""
    pipeline_tag: str = ""
    language: tuple[str, ...] = ()


@frozen
class CardFacts:
    """Everything a card is made from.

    Attributes:
        name: of the checkpoint's folder.
        report: with paths of the machine already shortened.
        record, recipe: keepmtp.json and recipe.yaml.
        groups: what is in the checkpoint.
        base_model: its Hub id, and how that is known.
        repository: where it is published; "" where that is not known yet.
        metadata: of the front matter.
        plots: the card's drawings, by name.
        is_chat, gpus: for the person who serves it.
        cures: that the report's vLLM needs.
        cured: each cure, with the versions that need it.
    """

    name: str
    report: FullReport
    record: Record
    recipe: str
    groups: tuple[ModuleGroup, ...]
    base_model: BaseModel
    repository: str
    metadata: Metadata
    plots: Mapping[str, bytes]
    is_chat: bool
    gpus: tuple[tuple[int, str, int], ...]
    cures: tuple[str, ...] = ()
    cured: tuple[str, ...] = ()

    @property
    def model(self) -> str:
        """What a reader names to serve it."""
        return self.repository or f"ORG/{self.name}"

    @property
    def best_k(self) -> BestK:
        """How many tokens to draft in a step, and why; 0 serves without drafting."""
        return best_k_of_report(self.report)

    @property
    def compared(self) -> str:
        """What was evaluated as the source: it may have another name, such as a copy with an MTP
        block.
        """
        name = self.record.source.name
        evaluation = self.report.evaluation
        if evaluation and evaluation.source:
            path = evaluation.source.path
            if PurePath(path).name != PurePath(name).name:
                return path
        return name

    def schemes(self, *parts: str) -> tuple[str, ...]:
        """Of the tensors on disk in these parts, all by default; in the order of the table of
        schemes.
        """
        used = set[str]()
        for group in self.groups:
            if not parts or group.part in parts:
                used.update(group.schemes)
        known = [name for name in SCHEMES if name in used]
        return (*known, *sorted(used - SCHEMES.keys()))


def page(facts: CardFacts) -> str:
    """The card's text. Equal values give equal bytes."""
    report = facts.report
    filters = {each.__name__: each for each in (code, codes, ticked, quoted, fenced, bare, Md)}
    measured = None
    for station in drafted(report.serve, report.evaluation):
        if station.checkpoint.drafts:
            measured = station
            break
    bench = report.bench
    if bench and not counts_bench(bench):
        bench = None
    sizes = {}
    for row in report.sizes:
        sizes[row.part, row.group] = row
    k = facts.best_k.k
    return template("card.md.j2", finalize=finalize, filters=filters, markup=Md).render(
        facts=facts,
        report=report,
        record=facts.record,
        tables=tables,
        known=SCHEMES,
        kernels=KERNELS,
        gpu_names=GPU_NAMES,
        versions=versions_in_short(report.dry),
        wanted=tables.wanted_filter(report),
        sizes=sizes,
        serve_command=shell(serve_words(facts.model, k, cures=facts.cures)),
        docker_command=shell(docker_words(facts.model, k, version=report.vllm, cures=facts.cures)),
        mended=_mended(report),
        drafted=measured,
        bench=bench,
        commands=list(_commands(facts)),
    )


def _mended(report: FullReport) -> str:
    """The cures that vLLM has applied while the checkpoint was measured, as a clause."""
    for part in (report.bench, report.evaluation, report.serve, report.closeness):
        if part and MENDED in part.checkpoint.reason:
            reason = part.checkpoint.reason
            return reason[reason.index(MENDED) :]
    return ""


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
    return Md(", ".join([code(word) for word in words]))


def _commands(facts: CardFacts) -> Iterator[Md]:
    """The commands that repeat the run and its measurements.

    None installs keepmtp: the package index does not have it, so anybody could take its name there.
    """
    out = facts.name
    source = ["--source", facts.record.source.name]
    block = []
    if facts.record.mtp_source:
        block = ["--mtp-source", facts.record.mtp_source.name]
    yield shell(["keepmtp", "quantize", "recipe.yaml", *source, *block, "--out", out])
    yield shell(["keepmtp", "check", out, "--record"])
    if facts.report.serve:
        yield shell(["keepmtp", "serve-check", out, *source])
    if facts.report.evaluation:
        yield shell(["keepmtp", "eval", out, "--source", facts.compared])
    if facts.report.bench:
        yield shell(["keepmtp", "bench", out])
    yield shell(["keepmtp", "card", out])
