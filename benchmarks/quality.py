"""What ten variants of tiny-docs keep, and a peer's own run, judged on the same held-out text:
docs/quality.md.

    python benchmarks/quality.py                    runs what is missing, then writes the page
    python benchmarks/quality.py --only nvfp4,fp8   these rows alone; the page keeps the others

In: `ROWS`, each a shipped variant with some keys changed. Out: the table of docs/quality.md, and
its figures in docs/quality.json. Each row is a recipe file, a command on one core in a process of
its own, and a finished checkpoint, which `judge.py` reads. A row whose recipe, release and versions
are those of an earlier run is not run again; its checkpoint is removed once it is judged.

A sequence is the sample. Every interval is the jackknife's over the held-out sequences at 95 %,
two-sided, and paired: a ratio is of two checkpoints on the same sequences, so that what is hard for
both cancels out (`acceptance.py`).

Easy to get wrong: an interval says how another text of this kind would come out, not how another
model would. And a comparison needs a base: a search is compared with the same scheme without it.
"""

import argparse
import hashlib
import json
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from math import exp, sqrt
from pathlib import Path
from typing import Any, NoReturn

import torch
import yaml
from judge import Judge, Reading
from keepmtp import __version__
from keepmtp.checkpoints.source import open_source
from keepmtp.cli.main import app
from keepmtp.quantize.calibrate.data.data import CalibrationData, calibration_data
from keepmtp.quantize.calibrate.mtp.acceptance import least_share
from keepmtp.recipes.find import find_recipe, read_recipe
from scipy import stats
from torch import Tensor

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
MODEL = "tiny-docs"
RELEASE = ROOT / "models" / MODEL
PACKAGES = ("torch", "transformers", "llmcompressor", "compressed-tensors")
# Sequences that are judged: those after the recipe's own held-out text, by which a run may choose.
HELD_OUT = 64
CONFIDENCE = 0.95
BEGIN, END = "<!-- table -->", "<!-- end of table -->"
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
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "quality")
    parser.add_argument("--only", help="rows, with commas; the page keeps the others as they are")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    # Not at import: tests import this module, and their children inherit the environment.
    os.environ["HF_HUB_OFFLINE"] = "1"
    keys = set(ROWS)
    if chosen.only:
        keys = {"nvfp4", *chosen.only.split(",")}
        keys |= {ROWS[key].base for key in keys}
    found = {key: row for key, row in ROWS.items() if key in keys}
    write_page(figures_of(run_rows(found, chosen.work)))


def versions() -> dict[str, str]:
    """Of what computes."""
    return {"keepmtp": __version__, **{name: version(name) for name in PACKAGES}}


def run_rows(rows: Mapping[str, Row], work: Path) -> dict[str, Facts]:
    """What each row's checkpoint does, the release first: counts by sequence, bytes and seconds."""
    work.mkdir(parents=True, exist_ok=True)
    data = held_out()
    found: dict[str, Facts] = {}
    with tempfile.TemporaryDirectory(dir=work) as folder:
        recipe = find_recipe(MODEL, scheme="nvfp4")[0]
        judge = Judge(RELEASE, recipe, data, Path(folder) / "states")
        found["release"] = counts(judge.release) | {"seconds": 0.0}
        for key, row in rows.items():
            stamp = stamp_of(key, row, data)
            kept = work / f"{key}.json"
            before = json.loads(kept.read_text()) if kept.is_file() else {}
            if before.get("stamp") != stamp:
                print(row.title, flush=True)
                out = Path(folder) / key
                seconds = run(key, row, work / f"{key}.yaml", out)
                before = counts(judge.read(out)) | {"seconds": seconds, "stamp": stamp}
                shutil.rmtree(out)
                kept.write_text(json.dumps(before))
            found[key] = before
    return found


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


def run(key: str, row: Row, file: Path, out: Path) -> float:
    """Make the row's checkpoint on one core, in a process of its own; the processor seconds that it
    took.
    """
    file.write_text(recipe_text(key, row))
    log = file.with_suffix(".log")
    sys.stdout.flush()
    child = os.fork()
    if not child:
        _become(row, file, out, log)
    _, status, used = os.wait4(child, 0)
    if status:
        sys.exit(f"{row.title}\n{log.read_text()[-5000:]}")
    return used.ru_utime + used.ru_stime


def _become(row: Row, file: Path, out: Path, log: Path) -> NoReturn:
    """Make it in this process, which has imported what it needs: an import takes as long as a tiny
    model.
    """
    opened = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(opened, 1)
    os.dup2(opened, 2)
    os.chdir(ROOT)
    try:
        if row.is_peers:
            by_llm_compressor(file, out)
        else:
            app(["quantize", str(file), "--out", str(out)], standalone_mode=False)
        sys.stdout.flush()
    except BaseException:  # noqa: BLE001 - whatever it is, a forked child must not go on as its parent would
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


class NoProcessor:
    """llm-compressor saves a tokenizer with the model; here is none to save."""

    def save_pretrained(self, *_: Any, **__: Any) -> None:
        """Saves nothing."""


def by_llm_compressor(file: Path, out: Path) -> None:
    """`oneshot` in its sequential pipeline with the preset of the recipe's scheme, on the recipe's
    text, and `save_pretrained`. It keeps no MTP block, and is not helped.
    """
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from torch.utils.data import DataLoader
    from transformers import AutoModelForCausalLM

    recipe = read_recipe(file)
    assert recipe.calibration is not None
    data = calibration_data(recipe.calibration, open_source(RELEASE))
    model = AutoModelForCausalLM.from_pretrained(
        RELEASE, dtype=torch.bfloat16, attn_implementation="eager"
    )
    batches = [{"input_ids": ids} for ids in data.ids.split(recipe.calibration.batch_size)]
    ignore = ["lm_head", "re:.*mlp.gate$", "re:.*in_proj_[ab]$"]
    scheme = recipe.backbone["attention"]
    oneshot(
        model=model,
        dataset=DataLoader(batches, batch_size=None),
        recipe=[QuantizationModifier(targets="Linear", scheme=scheme, ignore=ignore)],
        processor=NoProcessor(),
        pipeline="sequential",
    )
    model.save_pretrained(out)


def stamp_of(key: str, row: Row, data: CalibrationData) -> str:
    """SHA-256 of what a row's numbers depend on."""
    weights = [
        hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(RELEASE.glob("*.safetensors"))
    ]
    parts = [recipe_text(key, row), versions(), weights, dict(data.provenance)]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def counts(reading: Reading) -> dict[str, Any]:
    """A reading as sums by sequence: JSON values only; `choices` are compared once all rows are
    there.
    """
    target = reading.target
    return {
        "slots": [len(choices) for choices in target.choices],
        "log_likelihood": target.log_likelihoods.tolist(),
        "divergence": target.divergences.tolist(),
        "choices": target.choices.tolist(),
        "accepted": reading.acceptance.counts[:, 1:].tolist(),
        "num_slots": reading.acceptance.num_slots,
        "bytes": [reading.backbone_bytes, reading.mtp_bytes],
    }


# --- figures --------------------------------------------------------------------------------------


def figures_of(counts: Mapping[str, Facts]) -> dict[str, Any]:
    """The figures: by row, each with its value and the reach of its interval."""
    release = counts["release"]
    found = {}
    for key, own in counts.items():
        base = None
        if key != "release":
            base = counts.get(ROWS[key].base)
        found[key] = {
            "megabytes": [round(number / 1e6, 3) for number in own["bytes"]],
            "perplexity": ratio(own, release, perplexity, digits=6),
            "divergence": jackknife(features(own), divergence),
            "flips": jackknife(_flips(own, release), lambda sums: float(sums[0] / sums[1])),
            "kept": {str(k): kept(own, release, k) for k in KS},
            "against_base": ratio(own, base, divergence) if base else None,
            "time": round(own["seconds"] / counts["nvfp4"]["seconds"], 2),
        }
    accepted = [accepted_share(features(release).sum(dim=0), k) for k in KS]
    return {
        "versions": versions(),
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


def write_page(figures: dict[str, Any]) -> None:
    """Write the figures and the table; rows that were not run stay as they are, if the same
    versions made them.
    """
    stored = json.loads((DOCS / "quality.json").read_text())
    if stored["versions"] == figures["versions"]:
        rows = stored["rows"] | figures["rows"]
        figures["rows"] = {key: rows[key] for key in ("release", *ROWS) if key in rows}
    (DOCS / "quality.json").write_text(json.dumps(figures, indent=1) + "\n")
    page = DOCS / "quality.md"
    before, _, rest = page.read_text().partition(BEGIN)
    page.write_text(before + written(figures) + rest.partition(END)[2])


def written(found: Facts) -> str:
    """The table, between the markers, the markers included."""
    shares = [f"{share:.1%} at k={k}" for k, share in zip(KS, found["accepted"], strict=True)]
    release = found["rows"]["release"]["megabytes"]
    summary = (
        f"{MODEL}. The release: {release[0]:.2f} MB and an MTP block of {release[1]:.2f} MB, "
        f"perplexity {found['perplexity']:.4g}, of drafted tokens accepted {', '.join(shares)}. "
        f"Judged on {found['sequences']} sequences, {found['slots']:,} slots, of which "
        f"{found['counting_slots']:,} count for acceptance."
    )
    lines = [_line(HEAD), _line(["---"] * len(HEAD))]
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
        lines.append(_line(cells))
    return "\n".join([BEGIN, "", summary, "", *lines, "", END])


def _against(ratio: Sequence[float], base: str) -> str:
    if ratio == [1.0, 0.0]:
        return f"the same as {base}"
    return f"{_plus(ratio, 3)} of {base}"


def _plus(pair: Sequence[float], digits: int, *, unit: float = 1.0, sign: str = "") -> str:
    value, reach = (each / unit for each in pair)
    return f"{value:{sign}.{digits}f} ± {reach:.{digits}f}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
