"""README.md below its front matter: what a model card says, from report.json, keepmtp.json and recipe.yaml alone.

In: a `CardFacts`. Out: Markdown. Needs the `report` extra (jinja2). The sentences are in templates/card.md.j2; the rows
of its tables are made here.

Easy to get wrong: a card may only have numbers of the report, and numbers computed from them.
"""

import json
import shlex
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import metadata
from pathlib import Path

from ...checkpoints.record import Record
from ...recipes.schemes import SCHEMES
from ..facts.benched import Benched, BenchFact
from ..facts.dry_load import DryLoad, LoadedModel, gpu_title
from ..facts.evaluated import EvaluatedFact
from ..facts.schema import FullReport, GroupSize
from ..facts.served import Drafts, Served
from ..measure.bench_prompts import SHIPPED
from ..measure.serve_line import docker_words, serve_words
from . import closeness_words, hardware, numbers
from .base_model import BaseModel
from .best_k import BestK, best_k_of_report
from .card_limits import limitations
from .headline import counts_bench, counts_speed
from .markdown import Md, bare, code, fenced, finalize, quoted, ticked
from .provenance import ModuleGroup
from .sampled_gates import drafting_of
from .speed_table import failures, ks_of, recommendation, speed_rows
from .task_table import task_lines
from .usage import Usage

MAX_PROMPTS = 12
MAX_COLUMNS = 76
"""The Hub's page cuts longer lines of code, or hides their ends."""
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
        base_model: its Hub id, and how that is known.
        repository: where it is published; "" where that is not known yet.
        license: its name on the Hub; "" where it is not known.
        plots: the card's drawings, by name.
        usage: what its own files say to the person who serves it.
        off_leaderboard: why the score is no entry of the benchmark's leaderboard; "" where it is one.
    """

    name: str
    report: FullReport
    record: Record
    recipe: str
    choices: tuple[str, ...] | None
    groups: tuple[ModuleGroup, ...]
    base_model: BaseModel
    repository: str
    license: str
    plots: Mapping[str, bytes]
    usage: Usage
    off_leaderboard: str
    others_off_leaderboard: tuple[str, ...] = ()

    @property
    def schemes(self) -> tuple[str, ...]:
        """Of the tensors on disk, in the order of the table of schemes."""
        return self._schemes({"backbone", "mtp"})

    @property
    def mtp_schemes(self) -> tuple[str, ...]:
        """Of the MTP block."""
        return self._schemes({"mtp"})

    @property
    def best_k(self) -> BestK:
        """How many tokens to draft in a step, and why; 0 serves without drafting."""
        return best_k_of_report(self.report)

    @property
    def num_drafts(self) -> int:
        """The number alone."""
        return self.best_k.k

    def _schemes(self, parts: set[str]) -> tuple[str, ...]:
        used = {scheme for group in self.groups if group.part in parts for scheme in group.schemes}
        return (*(name for name in SCHEMES if name in used), *sorted(used - SCHEMES.keys()))


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
        "rate": rate,
        "bare": bare,
    }
    report = told.report
    bench = report.bench if report.bench and counts_bench(report.bench) else None
    return environment.get_template("card.md.j2").render(
        told=told,
        report=report,
        record=told.record,
        groups=list(_group_rows(told)),
        loads=list(_load_rows(report.dry)),
        hardware=hardware.where_they_run(told.schemes),
        read_from=hardware.READ_FROM,
        max_prompts=MAX_PROMPTS,
        accepted=accepted_rows(report),
        extra="calibrate" if report.calibration else "quantize",
        commands=list(_commands(told)),
        serve_command=serve_command(told),
        docker_command=docker_command(told),
        drafted=next((each for each in drafting_of(report.serve, report.evaluation) if each.checkpoint.drafts), None),
        client=client(told),
        home=_home(),
        is_timed=report.serve is not None and counts_speed(report.serve),
        bench_rows=list(speed_rows(bench)) if bench else [],
        bench_ks=ks_of(bench) if bench else (),
        bench_notes=list(_bench_notes(bench)) if bench else [],
        still_drafts=_still_drafts(report),
        closeness=closeness_words.sentence(report.closeness) if report.closeness else "",
        closeness_figures=list(closeness_words.figures(report.closeness)) if report.closeness else [],
        closeness_notes=list(closeness_words.notes(report.closeness)) if report.closeness else [],
        task_lines=task_lines(report),
        limitations=list(limitations(report, told.record, (told.off_leaderboard, *told.others_off_leaderboard))),
    )


def accepted_rows(report: FullReport) -> list[tuple[str, EvaluatedFact | Served | Benched, int, int, Drafts]]:
    """(what was asked, model, k, requests in flight, counters); the task's first, then serve-check's and bench's.

    Of bench it is each k under the smallest load; under others acceptance is nearly the same.
    """
    rows: list[tuple[str, EvaluatedFact | Served | Benched, int, int, Drafts]] = []
    if evaluation := report.evaluation:
        protocol = evaluation.protocol
        for model in evaluation.evaluated:
            asked = f"{protocol.title}, {count(model.num_questions)} questions"
            rows.append((asked, model, protocol.k, protocol.concurrency, model))
    if serve := report.serve:
        asked = f"serve-check, {count(len(serve.prompts))} prompts"
        rows += [(asked, model, run.k, 1, run) for model in serve.served for run in model.drafting]
    if bench := report.bench:
        load = min(bench.checkpoint.loads)
        for model in bench.benched:
            for cell in (model.cell(k, load) for k in ks_of(bench)):
                if cell:
                    asked = f"bench, {cell.repetitions[0].requests:,} prompts of {bench.prompts}"
                    rows.append((asked, model, cell.k, cell.concurrency, cell.drafts))
    return [row for row in rows if row[-1].draft_tokens]


def _bench_notes(bench: BenchFact) -> Iterator[str]:
    """What is recommended of the checkpoint, and what speaks against its figures."""
    yield from map(recommendation, bench.checkpoint.recommended)
    yield from bench.checkpoint.slower
    yield from failures(bench)


def _still_drafts(report: FullReport) -> bool:
    """Whether acceptance was measured and passed its gate: only then the card says that the block still drafts."""
    reasons = report.judgement.reasons if report.judgement else ()
    return any(reason.gate == "acceptance" and reason.verdict == "pass" for reason in reasons)


def percent(share: float | None, digits: int = 2) -> Md:
    """A share of one, rounded as on the page."""
    return Md("-" if share is None else numbers.percent(share, digits))


def points(share: float) -> Md:
    """A difference of two shares, in percentage points."""
    return Md(f"{100 * share:+.2f}")


def count(number: int) -> Md:
    """A whole number."""
    return Md(f"{number:,}")


def figure(value: float | None) -> Md:
    """A ratio or a perplexity."""
    return Md("-" if value is None else f"{value:.2f}" if value < 100 else f"{value:.4g}")


def rate(value: float) -> Md:
    """Tokens a second."""
    return Md(f"{value:,.1f}")


def size(num_bytes: int | None) -> Md:
    """Bytes for people."""
    return Md("-" if num_bytes is None else numbers.size(num_bytes))


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
        found[gpu_title(load.gpu), str(load.k), word, _kernels(load.target), _kernels(load.draft)].append(str(load.tp))
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


def shell(words: Iterable[str]) -> Md:
    """A command that a narrow column does not cut: on one line, or an option with its value on each.

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


def _bench_words(bench: BenchFact) -> Iterator[str]:
    """The options that ask the same matrix again; the prompts of others are named by their file."""
    own = bench.checkpoint
    loads = list(own.loads)
    yield from ("-k", ",".join(map(str, ks_of(bench))))
    yield from ("--concurrency", ",".join(str(each) for each in sorted({concurrency for concurrency, _ in loads})))
    if any(context for _, context in loads):
        yield from ("--context", ",".join(str(each) for each in sorted({context for _, context in loads})))
    if bench.prompts != Path(SHIPPED).name:
        yield from ("--prompts", bench.prompts)


def serve_command(told: CardFacts) -> Md:
    """What a reader types to serve it."""
    return shell(serve_words(told.repository or f"ORG/{told.name}", told.num_drafts))


def client(told: CardFacts) -> Md:
    """A Python program that asks the server, by its chat template where there is one."""
    model = json.dumps(told.repository or f"ORG/{told.name}")
    ask, question, answer = "completions", 'prompt="17 * 23 ="', "text"
    if told.usage.is_chat:
        message = '{"role": "user", "content": "What is 17 * 23?"}'
        ask, question, answer = "chat.completions", f"messages=[{message}]", "message.content"
    return fenced(
        "from openai import OpenAI\n\n"
        'client = OpenAI(base_url="http://localhost:8000/v1", api_key="none")\n'
        f"answer = client.{ask}.create(\n    model={model},\n    {question},\n)\n"
        f"print(answer.choices[0].{answer})",
        "python",
    )


def _home() -> str:
    """keepmtp's address, where the installed package names one; else ""."""
    urls = metadata("keepmtp").get_all("Project-URL") or ["Source, "]
    return urls[0].partition(", ")[2]


def docker_command(told: CardFacts) -> Md:
    """The same in a container of vLLM's own image."""
    return shell(docker_words(told.repository or f"ORG/{told.name}", told.num_drafts, version=told.report.vllm))


def _commands(told: CardFacts) -> Iterator[Md]:
    """The commands that repeat the run and its measurements.

    None installs keepmtp: the package index does not have it, so anybody could take its name there.
    """
    report, out, base = told.report, told.name, told.base_model
    source = ["--source", base.name if base.is_proven else told.record.source.name]
    block = ["--mtp-source", told.record.mtp_source.name] if told.record.mtp_source else []
    yield shell(["keepmtp", "quantize", "recipe.yaml", *source, *block, *(told.choices or ()), "--out", out])
    gpus = dict.fromkeys(load.gpu for load in report.dry)
    sizes = dict.fromkeys(str(load.tp) for load in report.dry)
    pretended = [word for gpu in gpus for word in ("--gpu", gpu)] + [word for tp in sizes for word in ("--tp", tp)]
    yield shell(["keepmtp", "check", out, "--record", *pretended])
    if report.serve:
        most = max((run.k for run in report.serve.checkpoint.runs), default=1)
        yield shell(["keepmtp", "serve-check", out, *source, "-k", str(max(1, most))])
    if report.evaluation:
        yield shell(["keepmtp", "eval", out, *source])
    if report.bench:
        yield shell(["keepmtp", "bench", out, *(source if report.bench.source else ()), *_bench_words(report.bench)])
    stated = ["--base-model", base.name] if base.name and not base.is_proven else []
    yield shell(["keepmtp", "card", out, *stated])
