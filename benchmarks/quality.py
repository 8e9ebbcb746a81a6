"""What ten variants of tiny-docs keep, and a peer's own run, judged on the same held-out text:
docs/tables/quality.md.

    python benchmarks/quality.py

In: `ROWS`, each a shipped variant with some keys changed. Out: the table of docs/tables/quality.md, and
its figures in docs/tables/quality.json. Each row is a recipe file, a run on one core, and a finished
checkpoint, which `judge.py` reads.

A sequence is the sample. Every interval is the jackknife's over the held-out sequences at 95 %,
two-sided, and paired: a ratio is of two checkpoints on the same sequences, so that what is hard for
both cancels out (`acceptance.py`).

Easy to get wrong: an interval says how another text of this kind would come out, not how another
model would. And a comparison needs a base: a search is compared with the same scheme without it.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from math import exp, sqrt
from pathlib import Path
from typing import Any

import torch
import yaml
from _helpers import ROOT
from calibrating import run_peer
from judge import Judge, Reading
from keepmtp import __version__, api
from keepmtp.checkpoints.source import open_source
from keepmtp.quantize.calibrate.data.data import CalibrationData, calibration_data
from keepmtp.recipes.find import find_recipe
from pages import table, with_part
from scipy import stats
from torch import Tensor

DOCS = ROOT / "docs" / "tables"
MODEL = "tiny-docs"
RELEASE = ROOT / "models" / MODEL
PACKAGES = ("torch", "transformers", "llmcompressor", "compressed-tensors")
# Sequences that are judged: those after the recipe's own held-out text, by which a run may choose.
HELD_OUT = 64
CONFIDENCE = 0.95
PAGE = DOCS / "quality.md"
KS = (1, 2, 3)
HEAD = (
    "",
    "variant",
    "MB",
    "MTP",
    "divergence, 10^-3",
    "of its base's",
    "flips, %",
    "perplexity, %",
    *(f"k={k}" for k in KS),
    "time",
)
TUNED = {
    "mtp": "tuned",
    "mtp_tuned": {
        "mtp": "NVFP4",
        "steps": 200,
        "batch_size": 4,
        "learning_rate": 1e-3,
        "seed": 0,
        "loss": "lk_hybrid",
        "draft_steps": 3,
        "decay": 0.6,
    },
    # Another file than the one that is judged on.
    "calibration": {"dataset": "models/docs_held_out.jsonl", "samples": 160, "held_out": 32},
}

Facts = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table.

    Attributes:
        title: what the page calls it.
        variant: of the model file, which `changes` are made in.
        changes: keys of a flat recipe; a mapping changes the keys that it names.
        base: the row that its divergence is compared with; "" for none.
        is_peers: llm-compressor's own command makes it.
    """

    title: str
    variant: str = "nvfp4"
    changes: Facts = field(default_factory=dict)
    base: str = ""
    is_peers: bool = False


def without_text(scheme: str) -> dict[str, Any]:
    """A scheme for the whole backbone that needs no text."""
    return {"backbone": scheme, "calibration": None}


BY_GPTQ = {"calibration": {"algorithm": "gptq"}}
ROWS = {
    "fp8-dynamic": Row(title="FP8, a scale a row", changes=without_text("FP8_DYNAMIC")),
    "nvfp4": Row(title="NVFP4"),
    "nvfp4-mtp-nvfp4": Row(title="NVFP4, MTP block too", changes={"mtp": "NVFP4"}, base="nvfp4"),
    "nvfp4-gptq": Row(title="NVFP4 by GPTQ", changes=BY_GPTQ, base="nvfp4"),
    "nvfp4a16": Row(title="NVFP4, 16-bit inputs", changes=without_text("NVFP4A16")),
    "w4a16": Row(title="W4A16", changes=without_text("W4A16")),
    "w4a16-gptq": Row(title="W4A16 by GPTQ", variant="w4a16-gptq", base="w4a16"),
    "w4a16-awq": Row(title="W4A16 by AWQ", variant="w4a16-awq", base="w4a16"),
    "tuned-nvfp4": Row(title="NVFP4, MTP block NVFP4 and tuned", changes=TUNED),
    "llm-compressor-nvfp4": Row(title="llm-compressor: NVFP4", base="nvfp4", is_peers=True),
}


def main() -> None:
    """Run, judge, write."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    torch.set_num_threads(1)
    # Not at import: tests import this module, and their children inherit the environment.
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.chdir(ROOT)
    with tempfile.TemporaryDirectory() as folder:
        write_page(measured(Path(folder)))


def measured(folder: Path) -> dict[str, Any]:
    """The figures: by row, each with its value and the reach of its interval."""
    judge = Judge(RELEASE, find_recipe(MODEL, scheme="nvfp4")[0], held_out(), folder / "states")
    release = judge.release
    readings, seconds = {"release": release}, {"release": 0.0}
    for key, row in ROWS.items():
        print(row.title, flush=True)
        recipe, out = recipe_text(key, row), folder / key
        if row.is_peers:
            seconds[key] = run_peer(yaml.safe_load(recipe), RELEASE, out)["seconds"]
        else:
            file = folder / f"{key}.yaml"
            file.write_text(recipe)
            started = time.process_time()
            api.quantize(api.plan(file), out, threads=1)
            seconds[key] = time.process_time() - started
        readings[key] = judge.read(out)
    found = {}
    for key, own in readings.items():
        base = None
        if key != "release" and ROWS[key].base:
            base = readings[ROWS[key].base]
        time_of_nvfp4 = round(seconds[key] / seconds["nvfp4"], 2)
        found[key] = {**figures_of(own, release, base), "time": time_of_nvfp4}
    accepted = release.acceptance
    return {
        "versions": {"keepmtp": __version__, **{name: version(name) for name in PACKAGES}},
        "sequences": len(release.target.choices),
        "slots": release.target.choices.numel(),
        "counting_slots": accepted.num_slots,
        "perplexity": round(release.target.perplexity, 4),
        "accepted": [round(sum(accepted.by_position(k)) / k, 4) for k in KS],
        "rows": found,
    }


def held_out() -> CalibrationData:
    """Sequences after the recipe's own held-out text: no run was calibrated on them, and none chose
    by them.
    """
    calibration = find_recipe(MODEL, scheme="nvfp4")[0].calibration
    assert calibration is not None
    own = calibration.held_out
    more = calibration.model_copy(update={"held_out": own + HELD_OUT})
    data = calibration_data(more, open_source(RELEASE))
    written_part = data.held_out_written
    if written_part is not None:
        written_part = written_part[own:]
    return replace(
        data,
        held_out_ids=data.held_out_ids[own:],
        held_out_written=written_part,
        provenance={**data.provenance, "judged_from": own},
    )


def recipe_text(key: str, row: Row) -> str:
    """The row's recipe: a shipped variant with the row's keys."""
    recipe, text = find_recipe(MODEL, scheme=row.variant)
    document = yaml.safe_load(text) | {"variant": key, "summary": row.title, "default": False}
    for word, value in row.changes.items():
        if word == "backbone":
            document[word] = dict.fromkeys(recipe.backbone, value)
        elif isinstance(value, Mapping) and isinstance(document.get(word), Mapping):
            document[word] = {**document[word], **value}
        else:
            document[word] = value
    return yaml.safe_dump(document, sort_keys=False)


# --- figures --------------------------------------------------------------------------------------


def figures_of(own: Reading, release: Reading, base: Reading | None) -> dict[str, Any]:
    """Of one checkpoint, against the release and the row that it is compared with."""
    ours, theirs = own.target, release.target
    slots = torch.full((len(ours.choices),), float(ours.choices.shape[1]), dtype=torch.float64)
    changed = (ours.choices != theirs.choices).sum(dim=1)
    lost = theirs.log_likelihoods - ours.log_likelihoods
    kept = {}
    for k, value, reach in zip(KS, *compared(own, release), strict=True):
        kept[str(k)] = [_short(value), _short(reach)]
    against = None
    if base is not None:
        against = jackknife(_pair(ours.divergences, base.target.divergences), quotient)
    return {
        "megabytes": [round(size / 1e6, 3) for size in (own.backbone_bytes, own.mtp_bytes)],
        # The first token of a sequence is given.
        "perplexity": jackknife(_pair(lost, slots - 1), lambda sums: exp(quotient(sums)), digits=6),
        "divergence": jackknife(_pair(ours.divergences, slots), quotient),
        "flips": jackknife(_pair(changed, slots), quotient),
        "kept": kept,
        "against_base": against,
    }


def compared(own: Reading, release: Reading) -> list[list[float]]:
    """The shares of the release's acceptance that are kept by what is accepted of 1, 2 and 3
    drafted tokens; and how far their intervals reach.
    """
    return own.acceptance.compared(release.acceptance, (1 + CONFIDENCE) / 2).tolist()


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


def quotient(sums: Tensor) -> float:
    return float(sums[0] / sums[1].clamp(min=1e-12))


def _pair(over: Tensor, under: Tensor) -> Tensor:
    """[N, 2] float64, by sequence."""
    return torch.stack([over, under], dim=1).double()


def _short(value: float, digits: int = 4) -> float:
    return float(f"{value:.{digits}g}")


# --- the page -------------------------------------------------------------------------------------


def write_page(figures: dict[str, Any]) -> None:
    """Write the figures and the table."""
    (DOCS / "quality.json").write_text(json.dumps(figures, indent=1) + "\n")
    PAGE.write_text(with_part(PAGE, written(figures)))


def written(found: Facts) -> str:
    """What the page has after its words."""
    shares = [f"{share:.1%} at k={k}" for k, share in zip(KS, found["accepted"], strict=True)]
    release = found["rows"]["release"]["megabytes"]
    summary = (
        f"{MODEL}. The release: {release[0]:.2f} MB and an MTP block of {release[1]:.2f} MB, "
        f"perplexity {found['perplexity']:.4g}, of drafted tokens accepted {', '.join(shares)}. "
        f"Judged on {found['sequences']} sequences, {found['slots']:,} slots, of which "
        f"{found['counting_slots']:,} count for acceptance."
    )
    rows = []
    for number, (key, row) in enumerate(ROWS.items(), start=1):
        own = found["rows"][key]
        against = ""
        if row.base:
            against = _against(own["against_base"], ROWS[row.base].title)
        mtp = "none"
        if own["megabytes"][1]:
            mtp = f"{own['megabytes'][1]:.2f}"
        cells = [
            str(number),
            row.title,
            f"{own['megabytes'][0]:.2f}",
            mtp,
            _plus(own["divergence"], 2, unit=1e-3),
            against,
            _plus(own["flips"], 2, unit=0.01),
            _plus([own["perplexity"][0] - 1, own["perplexity"][1]], 2, unit=0.01, sign="+"),
            *(_plus(own["kept"][str(k)], 1, unit=0.01) for k in KS),
            f"{own['time']:.2f}",
        ]
        rows.append(cells)
    return f"{summary}\n\n{table(HEAD, rows)}"


def _against(ratio: Sequence[float], base: str) -> str:
    if ratio == [1.0, 0.0]:
        return f"the same as {base}"
    return f"{_plus(ratio, 3)} of {base}"


def _plus(pair: Sequence[float], digits: int, *, unit: float = 1.0, sign: str = "") -> str:
    value, reach = (each / unit for each in pair)
    return f"{value:{sign}.{digits}f} ± {reach:.{digits}f}"


if __name__ == "__main__":
    main()
