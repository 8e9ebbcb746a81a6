"""report.html: one self-contained page from the content of report.json, and from nothing else.

In: a `FullReport`. Out: HTML with inline CSS and SVG, no script and no request; light, dark, on paper and on a phone.
Needs the `report` extra (jinja2, matplotlib); planning and checking do not.

Easy to get wrong: names in a report come from strangers' checkpoints. Everything is escaped; only our own charts, whose
labels matplotlib has escaped, go in as they are.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...checkpoints.files import write_whole
from ...recipes import extras
from ...recipes.errors import printable
from ..facts.benched import words_of
from ..facts.dry_load import DryLoad, KernelUse, gpu_title
from ..facts.schema import FullReport
from ..facts.served import Run
from . import closeness_words, speed_table
from .headline import places
from .numbers import percent, size
from .task_table import endless, task_lines

if TYPE_CHECKING:
    from markupsafe import Markup

    from .svg import Drawing

HTML_FILE = "report.html"
_TEMPLATES = Path(__file__).parent / "templates"
# What vLLM was doing when it stopped, by `LoadFailure.stage`.
_ACTS = {
    "config": "reading the config of",
    "construct": "building",
    "load": "loading",
    "share": "sharing weights with",
    "process": "preparing the weights of",
    "world": "starting",
    "crash": "judging",
}
_GATE_PILLS = {"pass": "good", "regression": "bad", "infeasible": "warn"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _KernelRow:
    """Layers of one model with one quant method, one kernel and one outcome; `first` is the prefix of the first."""

    role: str
    method: str
    kernel: str
    outcome: str
    layers: str
    count: int
    first: str
    where: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chart:
    """A drawing, what it is called, and what a screen reader says instead of it."""

    title: str
    drawing: "Drawing"
    alt: str


def require_extra() -> None:
    """Refuse where the page cannot be made; called before the work whose result it would show.

    Raises:
        RecipeError: a package of the `report` extra is missing.
    """
    extras.require_extra("report.html", "report")


def write_html(folder: Path, report: FullReport) -> Path:
    """Write report.html into `folder`, replacing an older one at once; returns its path.

    Raises:
        RecipeError: the `report` extra is missing.
    """
    return write_whole(folder / HTML_FILE, render(report))


def render(report: FullReport) -> str:
    """The page. Equal reports give equal bytes.

    Raises:
        RecipeError: the `report` extra is missing.
    """
    require_extra()
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    from . import svg

    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )
    environment.filters |= {
        "size": size,
        "percent": percent,
        "points": _points,
        "figure": _figure,
        "quoted": _quoted,
        "broken": _broken,
        "ticked": _ticked,
        "gpu_title": gpu_title,
    }
    runs = [(model.role, run) for model in report.serve.served for run in model.runs] if report.serve else []
    return environment.get_template("report.html.j2").render(
        report=report,
        name=Path(report.path).name or report.path,
        kernels=_kernels(report.dry),
        shared=_shared(report.dry),
        size_charts=_size_charts(report),
        serve_charts=_serve_charts(report),
        calibration_charts=_calibration_charts(report),
        evaluation_charts=_evaluation_charts(report),
        speed_charts=_speed_charts(report),
        speed_ks=speed_table.ks_of(report.bench) if report.bench else (),
        speed_rows=list(speed_table.speed_rows(report.bench)) if report.bench else [],
        speed_notes=_speed_notes(report),
        closeness_charts=_closeness_charts(report),
        closeness_figures=list(closeness_words.figures(report.closeness)) if report.closeness else [],
        closeness_notes=list(closeness_words.notes(report.closeness)) if report.closeness else [],
        load_words=words_of,
        task_lines=task_lines(report),
        endless=list(endless(report)),
        svg=lambda drawing: Markup(svg.svg(drawing)),  # noqa: S704 - our own chart, its labels escaped
        partings=[(role, run.k, one) for role, run in runs for one in run.partings or ()],
        notes=_notes(runs),
        acts=_ACTS,
        gate_pills=_GATE_PILLS,
        num_compared=sum(len(run.outputs) for _, run in runs if run.partings is not None),
    )


def _size_charts(report: FullReport) -> list[_Chart]:
    from . import plots

    titles = {"backbone": "Backbone", "mtp": "MTP block (a scale of its own)"}
    charts = []
    for part in dict.fromkeys(row.part for row in report.sizes):
        rows = [row for row in report.sizes if row.part == part]
        alt = "; ".join(f"{row.group} {size(row.num_bytes)}" for row in rows)
        charts.append(_Chart(title=titles.get(part, part), drawing=plots.sizes(rows), alt=alt))
    return charts


def _serve_charts(report: FullReport) -> list[_Chart]:
    from . import plots

    serve = report.serve
    ks = sorted({run.k for model in serve.served for run in model.drafting}) if serve else []
    if serve is None or not ks:
        return []
    k = ks[-1]
    runs = [(model.role, run) for model in serve.served if (run := model.run(k)) is not None]
    shares = "; ".join(f"{role}: {', '.join(map(percent, run.acceptance_per_position))}" for role, run in runs)
    timed = [(model.role, run) for model in serve.served for run in model.drafting if run.speed_up]
    faster = "; ".join(f"{role}, k={run.k}: {run.speed_up:.2f}" for role, run in timed)
    charts = [
        _Chart(
            title=f"Acceptance by position, k={k}",
            drawing=plots.acceptance(serve, k, plots.gates_of(report)),
            alt=shares,
        )
    ]
    if faster:
        charts.append(_Chart(title="Speed-up by k", drawing=plots.speed_up(serve), alt=faster))
    return charts


def _calibration_charts(report: FullReport) -> list[_Chart]:
    from . import plots

    found = report.calibration
    charts: list[_Chart] = []
    if found is None:
        return charts
    if found.measured:
        shares = "; ".join(
            f"{row.title}: {', '.join(map(percent, acceptance.shares))}" for row, acceptance in found.measured
        )
        charts.append(
            _Chart(
                title=f"Acceptance by position, held-out text, k={found.k}",
                drawing=plots.calibrated_acceptance(found),
                alt=shares,
            )
        )
    if any(each.acceptance for each in found.candidates):
        sizes = "; ".join(
            f"{number}. {each.title}: {size(each.bytes)}, keeps {percent(each.kept)}" + ", chosen" * each.chosen
            for number, each in enumerate(found.candidates, start=1)
            if each.acceptance
        )
        title = "Candidates for the MTP block, numbered as below"
        charts.append(_Chart(title=title, drawing=plots.candidates(found), alt=sizes))
    return charts


def _evaluation_charts(report: FullReport) -> list[_Chart]:
    from . import plots

    found = report.evaluation
    if found is None:
        return []
    gates = plots.gates_of(report)
    alt = "; ".join(
        f"{model.role}, {score.filter}: {percent(score.value)}" for model in found.evaluated for score in model.scores
    )
    charts = [_Chart(title="Right answers, two standard errors each way", drawing=plots.scores(found), alt=alt)]
    if found.paired:
        alt = "; ".join(
            f"{pair.filter}: {_points(pair.difference)}, from {_points(pair.low)} to {_points(pair.high)}"
            for pair in found.paired
        )
        charts.append(
            _Chart(
                title="Difference, question by question",
                drawing=plots.differences(found, gates),
                alt=f"{alt}; limit: {100 * gates.max_drop:g} points lost",
            )
        )
    drafting = [model for model in found.evaluated if model.drafts]
    if drafting:
        alt = "; ".join(f"{model.role}: {', '.join(map(percent, model.acceptance_per_position))}" for model in drafting)
        charts.append(
            _Chart(
                title=f"Acceptance by position over these questions, k={found.protocol.k}",
                drawing=plots.evaluated_acceptance(found, gates),
                alt=alt,
            )
        )
    return charts


def _speed_charts(report: FullReport) -> list[_Chart]:
    bench = report.bench
    if bench is None:
        return []
    from . import plots, speed_plots

    said = "; ".join(speed_table.recommendation(row) for row in bench.checkpoint.recommended)
    drawn = (
        ("Speed over k by load, from the slowest to the fastest repetition", speed_plots.speed_over_k(bench)),
        ("Speed of source and checkpoint", speed_plots.speed_of_both(bench)),
    )
    charts = [_Chart(title=title, drawing=drawing, alt=said) for title, drawing in drawn if drawing]
    if found := speed_plots.bench_acceptance(bench, plots.gates_of(report)):
        k, drawing = found
        cells = [(model.role, model.cell(k, min(bench.checkpoint.loads))) for model in bench.benched]
        alt = "; ".join(
            f"{role}: {', '.join(map(percent, cell.acceptance_per_position))}" for role, cell in cells if cell
        )
        charts.append(_Chart(title=f"Acceptance by position over these prompts, k={k}", drawing=drawing, alt=alt))
    return charts


def _closeness_charts(report: FullReport) -> list[_Chart]:
    if report.closeness is None:
        return []
    from . import closeness_plot

    alt = "; ".join(f"{name}: {figure}" for name, figure in closeness_words.figures(report.closeness))
    drawing = closeness_plot.divergences(report.closeness)
    return [_Chart(title="Divergence by token", drawing=drawing, alt=alt)]


def _speed_notes(report: FullReport) -> list[str]:
    """What is recommended of the checkpoint, and what a reader should know."""
    if report.bench is None:
        return []
    own = report.bench.checkpoint
    return [*map(speed_table.recommendation, own.recommended), *own.slower, *speed_table.failures(report.bench)]


def _kernels(loads: Iterable[DryLoad]) -> list[_KernelRow]:
    """One row for each quant method and kernel, with the GPUs and TP sizes that agree on it; refusals first."""
    found: dict[tuple[str, str, str, str, str, int, str], list[DryLoad]] = defaultdict(list)
    for load in loads:
        for role, model in (("target", load.target), ("draft", load.draft)):
            groups: dict[tuple[str, str, str], list[KernelUse]] = defaultdict(list)
            for use in model.kernels:
                groups[use.method, use.kernel, use.outcome].append(use)
            for key, uses in groups.items():
                layers = ", ".join(dict.fromkeys(use.layer for use in uses))
                found[role, *key, layers, sum(use.count for use in uses), uses[0].where].append(load)
    rows = [
        _KernelRow(
            role=role,
            method=method,
            kernel=kernel,
            outcome=outcome,
            layers=layers,
            count=count,
            first=first,
            where=places(where),
        )
        for (role, method, kernel, outcome, layers, count, first), where in found.items()
    ]
    return sorted(rows, key=lambda row: (not row.outcome.startswith("refused"), row.role != "target"))


def _shared(loads: Iterable[DryLoad]) -> list[tuple[str, str]]:
    """(parameter shared with the target, where)."""
    found: dict[str, list[DryLoad]] = {}
    for load in loads:
        for name in load.draft.shared:
            found.setdefault(name, []).append(load)
    return [(name, places(where)) for name, where in sorted(found.items())]


def _notes(runs: Iterable[tuple[str, Run]]) -> list[tuple[str, int, str]]:
    """(model, k, what a reader should know)."""
    found = []
    for role, run in runs:
        found += [(role, run.k, note) for note in run.notes]
        found += [(role, run.k, f"{name} was not written.") for name in run.unwritten]
        if not run.is_repeatable:
            found.append((role, run.k, "Two passes of this server wrote different tokens."))
    return found


def _shown(value: object) -> object:
    """What the page prints for a value: a stranger's control characters and marks of direction as `\\x1b`."""
    return printable(value) if type(value) is str else value


def _points(share: float) -> str:
    """A difference of shares, signed."""
    return f"{100 * share:+.2f} points"


def _figure(value: float) -> str:
    """A perplexity: four digits, or a power of ten."""
    return f"{value:#.4g}" if value < 1e4 else f"{value:.2e}"


def _broken(name: str) -> "Markup":
    """A name with break opportunities after its dots, underscores and humps, escaped."""
    from markupsafe import Markup, escape

    parts = re.split(r"(?<=[._/,])(?=[^._/,])|(?<=[a-z0-9])(?=[A-Z])", printable(name))
    return Markup("<wbr>").join(map(escape, parts))


def _ticked(words: str) -> "Markup":
    """A sentence, escaped, with the words between backticks as code."""
    from markupsafe import Markup, escape

    words = printable(words)
    parts = words.split("`")
    if len(parts) % 2 == 0:
        return escape(words)
    code = Markup("<code>{}</code>").format
    return Markup("").join(code(part) if spot % 2 else escape(part) for spot, part in enumerate(parts))


def _quoted(text: str) -> str:
    """Text of a model on one line, with its line ends and quotes visible."""
    return printable(json.dumps(text, ensure_ascii=False))
