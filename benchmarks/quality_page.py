"""docs/quality.md: the rows that most people ask for, and a plot. docs/quality_rows.md: a table for
each model with intervals, what is told apart and what is not.

In: counts by sequence of every row, from `quality.py`. Out: docs/quality.json with the figures, and
the table and plot made of them. The page's words stand outside of the markers and are written by
hand.

A sequence is the sample. Every interval is the jackknife's over the held-out sequences at 95 %,
two-sided, and paired: a ratio is of two checkpoints on the same sequences, so that what is hard for
both cancels out (`acceptance.py`).

Easy to get wrong: an interval says how another text of this kind would come out, not how another
model would. And of forty rows, two differ from their base by chance.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from math import exp, sqrt
from pathlib import Path
from typing import Any

import torch
from keepmtp.quantize.calibrate.mtp.acceptance import least_share
from quality_rows import SHORT, SHORT_MODEL, Row, rows_of
from scipy import stats
from torch import Tensor

CONFIDENCE = 0.95
BEGIN, END = "<!-- table -->", "<!-- end of table -->"
KS = (1, 2, 3)

Facts = Mapping[str, Any]


def write_page(
    counts: Mapping[str, Mapping[str, Facts]], versions: Mapping[str, str], docs: Path
) -> None:
    """Write the figures, the page's tables and the plot.

    Args:
        counts: model -> row -> what it does, by sequence; the release is row `release`.
        versions: of what computed them.
        docs: the folder.
    """
    figures = {
        "versions": dict(versions),
        "models": {model: figures_of(model, rows) for model, rows in counts.items()},
    }
    stored = json.loads((docs / "quality.json").read_text())
    if stored["versions"] == figures["versions"]:  # rows that were not run stay as they are
        for model, found in stored["models"].items():
            own = figures["models"].setdefault(model, found)
            keys = ("release", *(row.key for row in rows_of(model)))
            rows = found["rows"] | own["rows"]
            own["rows"] = {key: rows[key] for key in keys if key in rows}
        figures["models"] = {model: figures["models"][model] for model in stored["models"]}
    (docs / "quality.json").write_text(json.dumps(figures, indent=1) + "\n")
    for name, text in (("quality.md", short_table(figures)), ("quality_rows.md", tables(figures))):
        before, _, rest = (docs / name).read_text().partition(BEGIN)
        (docs / name).write_text(before + text + rest.partition(END)[2])
    from quality_plot import draw

    (docs / "quality.svg").write_text(draw(figures))


# --- figures --------------------------------------------------------------------------------------


def figures_of(model: str, counts: Mapping[str, Facts]) -> dict[str, Any]:
    """A model's figures: by row, each with its value and the reach of its interval."""
    release = counts["release"]
    bases = {row.key: row.base for row in rows_of(model)}
    found = {}
    for key, own in counts.items():
        base = counts.get(bases.get(key, ""))
        found[key] = {
            "megabytes": [round(number / 1e6, 3) for number in own["bytes"]],
            "perplexity": ratio(own, release, perplexity, digits=6),
            "divergence": jackknife(features(own), divergence),
            "flips": jackknife(_flips(own, release), lambda sums: float(sums[0] / sums[1])),
            "kept": {str(k): kept(own, release, k) for k in KS},
            "against_base": ratio(own, base, divergence) if base and key != "release" else None,
            "time": round(own["seconds"] / counts["nvfp4"]["seconds"], 2),
        }
        if own["bare"] is not None:
            found[key]["bare"] = round(own["bare"] / counts["nvfp4"]["seconds"], 2)
    accepted = [accepted_share(features(release).sum(dim=0), k) for k in KS]
    return {
        "sequences": len(release["slots"]),
        "slots": sum(release["slots"]),
        "counting_slots": release["num_slots"],
        "perplexity": round(perplexity(features(release).sum(dim=0)), 4),
        "accepted": [round(share, 4) for share in accepted],
        "rows": found,
    }


def jackknife(
    values_NF: Tensor, statistic: Callable[[Tensor], float], *, digits: int = 4
) -> list[float]:
    """A statistic of sums over sequences, and how far its interval reaches to either side; so many
    digits of each.
    """
    total, count = values_NF.sum(dim=0), len(values_NF)
    without = [statistic(total - row) for row in values_NF]
    mean = sum(without) / count
    variance = (count - 1) / count * sum((each - mean) ** 2 for each in without)
    reach = float(stats.t.ppf((1 + CONFIDENCE) / 2, count - 1)) * sqrt(variance)
    return [_short(statistic(total), digits), _short(reach, digits)]


def features(counts: Facts) -> Tensor:
    """[N, F] float64, by sequence: slots, log likelihood, divergence, known tokens, and the counts
    of acceptance.
    """
    first = torch.tensor(
        [counts[key] for key in ("slots", "log_likelihood", "divergence")], dtype=torch.float64
    ).T
    return torch.cat(
        [first, first[:, :1] - 1, torch.tensor(counts["accepted"], dtype=torch.float64).flatten(1)],
        dim=1,
    )


def divergence(sums: Tensor) -> float:
    """Nats a slot."""
    return float(sums[2] / sums[0])


def perplexity(sums: Tensor) -> float:
    """Per token; the first token of a sequence is given."""
    return exp(-float(sums[1] / sums[3]))


def accepted_share(sums: Tensor, k: int) -> float:
    """The share of drafted tokens that a server accepts where it drafts `k` a step."""
    size = len(KS)
    reached, accepted = sums[4:].view(2, size, size)[:, k - 1, :k]
    rates = torch.where(
        reached > 0, accepted / reached.clamp(min=1e-300), torch.zeros_like(accepted)
    )
    return float(rates.cumprod(dim=0).mean())


def ratio(
    own: Facts, other: Facts, statistic: Callable[[Tensor], float], *, digits: int = 4
) -> list[float]:
    pair = torch.cat([features(own), features(other)], dim=1)
    half = pair.shape[1] // 2

    def quotient(sums: Tensor) -> float:
        return statistic(sums[:half]) / max(statistic(sums[half:]), 1e-12)

    return jackknife(pair, quotient, digits=digits)


def kept(own: Facts, release: Facts, k: int) -> list[float]:
    """The share of the release's acceptance, by what is accepted of `k` drafted tokens."""
    value, reach = ratio(own, release, lambda sums: accepted_share(sums, k))
    return [value, max(reach, _short(1 - least_share(1.0, own["num_slots"], CONFIDENCE)))]


def _flips(own: Facts, release: Facts) -> Tensor:
    changed = torch.tensor(own["choices"]) != torch.tensor(release["choices"])
    return torch.stack([changed.sum(dim=1), torch.tensor(own["slots"])], dim=1).double()


def _short(value: float, digits: int = 4) -> float:
    return float(f"{value:.{digits}g}")


# --- the page -------------------------------------------------------------------------------------


def short_table(figures: Facts) -> str:
    """The rows of the first page, between the markers, the markers included."""
    found = figures["models"][SHORT_MODEL]
    rows = [row for row in rows_of(SHORT_MODEL) if row.key in SHORT]
    lines = _table(rows, found)
    return "\n".join([BEGIN, f"\n{SHORT_MODEL}. {_summary(found)}", "", *lines, "", END])


def tables(figures: Facts) -> str:
    """All between the markers, the markers included."""
    parts = [BEGIN]
    for model, found in figures["models"].items():
        parts += [
            f"\n## {model}\n",
            _summary(found),
            "",
            *_table(rows_of(model), found),
            "",
            _told_apart(model, found),
        ]
    words = ", ".join(f"{name} {number}" for name, number in figures["versions"].items())
    return "\n".join([*parts, f"\nMade with {words}.", END])


def _summary(found: Facts) -> str:
    shares = ", ".join(
        f"{share:.1%} at k={k}" for k, share in zip(KS, found["accepted"], strict=True)
    )
    release = found["rows"]["release"]["megabytes"]
    return (
        f"The release: {release[0]:.2f} MB and an MTP block of {release[1]:.2f} MB, perplexity "
        f"{found['perplexity']:.4g}, of drafted tokens accepted {shares}. Judged on "
        f"{found['sequences']} sequences, "
        f"{found['slots']:,} slots, of which {found['counting_slots']:,} count for acceptance."
    )


def _table(rows: Sequence[Row], found: Facts) -> list[str]:
    head = [
        "",
        "variant",
        "MB",
        "MTP",
        "divergence, 10^-3",
        "of its base's",
        "flips, %",
        "perplexity, %",
    ]
    head += [*(f"k={k}" for k in KS), "time", "without"]
    lines = [_line(head), _line(["---"] * len(head))]
    titles = {row.key: row.title for row in rows}
    for number, row in enumerate(rows, start=1):
        own = found["rows"][row.key]
        cells = [
            str(number),
            row.title,
            f"{own['megabytes'][0]:.2f}",
            f"{own['megabytes'][1]:.2f}" if own["megabytes"][1] else "none",
            _plus(own["divergence"], 2, unit=1e-3),
            _against(own["against_base"], titles.get(row.base, "")),
            _plus(own["flips"], 2, unit=0.01),
            _plus(_change(own["perplexity"]), 2, unit=0.01, sign="+"),
            *(_plus(own["kept"][str(k)], 1, unit=0.01) for k in KS),
            f"{own['time']:.2f}",
            f"{own['bare']:.2f}" if "bare" in own else "",
        ]
        lines.append(_line(cells))
    return lines


def _told_apart(model: str, found: Facts) -> str:
    """What the intervals say of each row against its base, and of acceptance against the
    release's.
    """
    numbers = {row.key: str(number) for number, row in enumerate(rows_of(model), start=1)}
    rows = [row for row in rows_of(model) if row.base]
    sides = {"lower": [], "higher": [], "not told apart": []}
    for row in rows:
        sides[_side(found["rows"][row.key]["against_base"])].append(numbers[row.key])
    kept = {
        numbers[row.key]: [_side(found["rows"][row.key]["kept"][str(k)]) for k in KS]
        for row in rows_of(model)
    }
    less, more = (
        [title for title, each in kept.items() if side in each] for side in ("lower", "higher")
    )
    parts = [f"{side}: {', '.join(names)}" for side, names in sides.items() if names]
    return (
        f"Beyond their intervals, divergence against the base: {'; '.join(parts)}. Acceptance at "
        "some k below the "
        f"release's: {', '.join(less) or 'none'}; above it: {', '.join(more) or 'none'}."
    )


def _side(ratio: Sequence[float]) -> str:
    value, reach = ratio
    if value + reach < 1:
        return "lower"
    return "higher" if value - reach > 1 else "not told apart"


def _against(ratio: Sequence[float] | None, base: str) -> str:
    if ratio is None:
        return ""
    return f"the same as {base}" if ratio == [1.0, 0.0] else f"{_plus(ratio, 3)} of {base}"


def _change(ratio: Sequence[float]) -> list[float]:
    return [ratio[0] - 1, ratio[1]]


def _plus(pair: Sequence[float], digits: int, *, unit: float = 1.0, sign: str = "") -> str:
    value, reach = (each / unit for each in pair)
    return f"{value:{sign}.{digits}f} ± {reach:.{digits}f}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
