"""What a tuned MTP block forgets: one training recipe after another, judged on three kinds of text.

    python benchmarks/forgetting.py             runs what is missing and prints it
    python benchmarks/forgetting.py --page      writes the table of docs/quality_rows.md: every model
                                                that was run
    python benchmarks/forgetting.py --wide      learning rates at eight times the width
    python benchmarks/forgetting.py --games     how often the guards take a block that lost
    python benchmarks/forgetting.py --texts     writes the texts alone; KIND-train.jsonl are for
                                                models/train/train.py

In: `ARMS`, each a text to train on and what holds the block near the release. Out: a table of the
drafts that are accepted, as a share of those of the same block untrained behind the same backbone,
by kind of text, with 95 % limits, paired by sequence. Training, rounding and judging are the
package's own; an arm that lost is a few lines here and nowhere else.

Easy to get wrong: what has been seen. Text to train on, text that chooses the share of the way and
text that is judged are three sets of rows, and for documentation and code of different modules.
"""

import argparse
import ast
import copy
import json
import math
import random
import shutil
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "models" / "train"))
from f32_products import multiply_in_f32
from keepmtp.checkpoints.source import open_source
from keepmtp.quantize.calibrate.data.data import CalibrationData, calibration_data
from keepmtp.quantize.calibrate.layers.backbone import Backbone, calibrate_backbone
from keepmtp.quantize.calibrate.mtp import mtp_policy
from keepmtp.quantize.calibrate.mtp.acceptance import (
    Acceptance,
    Target,
    acceptance,
    block_input,
    target,
)
from keepmtp.quantize.calibrate.mtp.mtp_block import draft_steps
from keepmtp.quantize.calibrate.mtp.mtp_pass import SHARES, gains, tune
from keepmtp.quantize.calibrate.mtp.mtp_policy import PolicyResults
from keepmtp.quantize.calibrate.mtp.own_text import with_own_text
from keepmtp.quantize.calibrate.mtp.tuning import Training, draft_loss, rate_at
from keepmtp.quantize.plan.plan import Plan, make_plan
from keepmtp.quantize.run.ranks import Ranks
from keepmtp.recipes.find import find_recipe
from keepmtp.recipes.schema import Texts
from problems import distinct_problems
from python_docs import library, passages
from safetensors.torch import load_file, save_file
from torch import Tensor

ROOT = Path(__file__).parent.parent
KINDS = ("docs", "code", "problems")
CONFIDENCE = 0.95
GAMES = 200
BEGIN, END = "<!-- begin forgetting -->", "<!-- end of forgetting -->"
HEAD = (
    "| model | training | trained on | of the way | docs, k=1, 2, 3 | code | problems | mean gain | lowest | "
    "written |"
)
SETTINGS = {
    "mtp": "NVFP4",
    "steps": 64,
    "batch_size": 4,
    "learning_rate": 1e-3,
    "seed": 0,
    "loss": "lk_hybrid",
    "draft_steps": 3,
    "decay": 0.6,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Sequences, and tokens in each.

    Attributes:
        samples: to train on, of all kinds together; the backbone is calibrated on all of them.
        guard: of each kind, to choose the share on.
        judged: of each kind.
    """

    samples: int = 144
    guard: int = 16
    judged: int = 128
    length: int = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way to train.

    Attributes:
        kinds: that are trained on, evenly.
        pull: of the way back to the released weights, after each step at the highest rate.
        kl: weight of the divergence from the released block's drafts.
        is_own: the model's own text: its answers to the first quarter of each sequence.
        settings: in place of those of `SETTINGS`.
    """

    title: str
    kinds: tuple[str, ...]
    pull: float = 0.0
    kl: float = 0.0
    is_own: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Of its file."""
        return "-".join(
            [
                *self.kinds,
                f"pull{self.pull}",
                f"kl{self.kl}",
                *["own"] * self.is_own,
                *(f"{k}{v}" for k, v in self.settings.items()),
            ]
        )


PROBLEMS, DOCS = ("problems",), ("docs",)
ARMS = (
    Arm(title="one kind", kinds=PROBLEMS),
    Arm(title="mixed batches", kinds=KINDS),
    Arm(title="mixed batches, weights pulled back", kinds=KINDS, pull=0.05),
    Arm(title="mixed batches, drafts held to the release's", kinds=KINDS, kl=1.0),
    Arm(title="mixed batches of its own text", kinds=KINDS, is_own=True),
    Arm(title="mixed batches, 200 steps", kinds=KINDS, settings={"steps": 200}),
    Arm(title="weights pulled back", kinds=PROBLEMS, pull=0.05),
    Arm(title="drafts held to the release's", kinds=PROBLEMS, kl=1.0),
    Arm(title="one kind", kinds=DOCS),
    Arm(title="weights pulled back", kinds=DOCS, pull=0.05),
    Arm(title="drafts held to the release's", kinds=DOCS, kl=1.0),
)
RATES = tuple(
    Arm(
        title=f"{key} {rate:g}",
        kinds=DOCS,
        settings={"steps": 24, "learning_rate": None, key: rate},
    )
    for key, rate in (
        ("learning_rate", 1e-3),
        ("relative_rate", 0.0035),
        ("relative_rate", 0.014),
        ("relative_rate", 0.056),
    )
)
"""Tried at eight times the width, where the spread of weights is an eighth."""


class Held(Training):
    """Training that is held near the release, in weights or in drafts."""

    arm: Arm
    losses: list[float]

    def __init__(self, plan: Plan, backbone: Backbone, block: Any):
        super().__init__(plan, backbone, block)
        self._first = {name: master.clone() for name, master in self._masters.items()}
        self._untrained = copy.deepcopy(block)

    def _step(self, step: int) -> None:
        super()._step(step)
        part = self.arm.pull * rate_at(step, self.settings.steps)
        for name, master in self._masters.items():
            master.lerp_(self._first[name], part)

    def _backward(self, row: int) -> Tensor:
        own = [KINDS.index(kind) for kind in self.arm.kinds]  # kinds lie in turns
        turn, place = divmod(row, len(own))
        row = (turn * len(KINDS) + own[place]) % len(self._backbone.data.ids)
        total = super()._backward(row)
        self.losses.append(float(total))
        if not self.arm.kl:
            return total
        skeleton = self._backbone.skeleton
        batch = self._backbone.batches("mtp").batch(row, row + 1)
        with torch.no_grad():
            hidden = block_input(skeleton, self._block, batch)
        given = {
            "ids": batch.ids.to(skeleton.device),
            "hidden": hidden,
            "num_steps": self.settings.draft_steps,
        }
        tokens = skeleton.model.get_input_embeddings()
        outputs = draft_steps([self._block], tokens, **given)
        with torch.no_grad():
            wanted = draft_steps([self._untrained], tokens, **given)
        heads = (self._block.head or skeleton.model.get_output_embeddings(),) * 2
        weights = [self.settings.decay**turn for turn in range(len(outputs))]
        gradients = []
        for step, (output, other, weight) in enumerate(
            zip(outputs, wanted, weights, strict=True), 1
        ):
            count = batch.ids.shape[1] - step
            _, found = draft_loss(output[0, :count], other[0, :count], heads, "kl_div")
            gradient = torch.zeros_like(output)
            scale = self.arm.kl * weight / sum(weights) / (self.settings.batch_size * count)
            gradient[0, :count] = found * scale
            gradients.append(gradient)
        torch.autograd.backward(outputs, gradients)
        return total


def widen(model: Path, out: Path, times: int) -> None:
    """The same function at a larger hidden size: each channel stands there so many times, and what
    reads it has that part of its weight in each place. Weights are as small as in large releases.
    """
    shutil.copytree(model, out, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((model / "config.json").read_text())
    width = config["hidden_size"]
    config["hidden_size"] = width * times
    (out / "config.json").write_text(json.dumps(config))
    for file in model.glob("*.safetensors"):
        tensors = load_file(file)
        for name, value in tensors.items():
            leaf = name.removesuffix(".weight").rpartition(".")[2]
            if leaf in ("embed_tokens", "eh_proj", "lm_head", "head") or value.shape[-1] == width:
                if value.ndim > 1 and leaf not in ("o_proj", "down_proj"):
                    parts = [each.repeat(1, times) for each in value.split(width, dim=1)]
                    value = torch.cat(parts, dim=1) / (1 if leaf == "embed_tokens" else times)
                elif value.ndim == 1 and not name.endswith("_proj.bias"):
                    value = value.repeat(times)
            if leaf in ("o_proj", "down_proj", "eh_proj"):
                value = value.repeat(times, 1)
            tensors[name] = value
        save_file(tensors, out / file.name, metadata={"format": "pt"})


# --- text -----------------------------------------------------------------------------------------


def write_texts(folder: Path) -> None:
    """KIND.jsonl to tune on, KIND-judged.jsonl, and KIND-train.jsonl for whole models, one
    `{"text": ...}` a line.
    """
    rows: dict[str, list[str]] = {"code": [], "code-judged": [], "code-train": []}
    rows["docs-train"] = [*passages("train")]
    for name, side in (("docs", "docs"), ("docs_held_out", "docs-judged")):
        rows[side] = [row["text"] for row in _rows(ROOT / "models" / f"{name}.jsonl")]
    rows["problems"] = [
        row["prompt"] + row["completion"] for row in _rows(ROOT / "models" / "problems.jsonl")
    ]
    for side, is_held_out, seed, count in (("judged", True, 1, 1600), ("train", False, 0, 20_000)):
        drawn = distinct_problems(count, held_out=is_held_out, seed=seed)
        found = (each.prompt + each.completion for each in drawn)
        rows[f"problems-{side}"] = [text for text in found if text not in rows["problems"]]
    for name, text in _code():  # by the file: one of ten is judged, one is tuned on
        rest = zlib.crc32(name.encode()) % 10
        rows[{0: "code-judged", 1: "code"}.get(rest, "code-train")].append(text)
    for name, texts in rows.items():
        random.Random(0).shuffle(texts)
        lines = [json.dumps({"text": text}) for text in texts]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


def _rows(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _code() -> Iterator[tuple[str, str]]:
    """Functions and classes of the standard library without docstrings, with their module."""
    for path, module in library():
        for node in module.body:
            if not isinstance(node, ast.ClassDef | ast.FunctionDef):
                continue
            for own in ast.walk(node):
                is_named = isinstance(own, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
                if is_named and ast.get_docstring(own) and len(own.body) > 1:
                    del own.body[0]
            yield ".".join(path.parts), ast.unparse(node)


def texts_of(folder: Path, name: str) -> dict[str, Any]:
    """Of a calibration block: a file of `write_texts`."""
    return {
        "dataset": str(folder / f"{name}.jsonl"),
        "dataset_revision": "local",
        "split": "train",
        "column": "text",
    }


# --- runs -----------------------------------------------------------------------------------------


def plan_of(
    model: Path, arm: Arm, texts: Path, size: Size, device: torch.device
) -> tuple[Plan, CalibrationData]:
    """An NVFP4 backbone and block, and all text; of the held-out rows, those of the guard first."""
    recipe, _ = find_recipe("tiny-docs", scheme="nvfp4")
    first, *others = KINDS
    also = [{"share": 1 / len(KINDS), **texts_of(texts, kind)} for kind in others]
    sizes = {
        "samples": size.samples,
        "held_out": size.guard + size.judged,
        "sequence_length": size.length,
    }
    document = recipe.model_dump(mode="json") | {"mtp": "tuned"}
    document["calibration"] |= {**texts_of(texts, first), "also": also, **sizes}
    document["mtp_tuned"] = SETTINGS | dict(arm.settings)
    recipe = type(recipe).model_validate(document)
    guard = [Texts.model_validate(texts_of(texts, f"{kind}-judged")) for kind in KINDS]
    data = calibration_data(recipe.calibration, open_source(model), guard)
    rows = data.rows_of_kinds
    of_kinds = [rows[texts.title] for texts in guard]
    places = [row for own in of_kinds for row in own[: size.guard]]
    places += [row for own in of_kinds for row in own[size.guard :]]
    kinds = [kind for count in (size.guard, size.judged) for kind in KINDS for _ in range(count)]
    held = data.held_out_ids[places]
    plan = make_plan(recipe, open_source(model))
    if arm.is_own:
        own = replace(data, held_out_ids=data.ids, held_out_written=None)
        with tempfile.TemporaryDirectory() as folder:
            own = with_own_text(plan, own, Path(folder), device=device)
        data = replace(data, ids=own.held_out_ids)
    return plan, replace(
        data, held_out_ids=held, held_out_written=None, held_out_kinds=tuple(kinds)
    )


def run(
    model: Path, arm: Arm, texts: Path, folder: Path, size: Size, device: torch.device
) -> dict[str, Any]:
    """What `tune` says on the guard's rows, and on the judged ones counts of the block untrained,
    with the share that was chosen, and all of the way.
    """
    plan, data = plan_of(model, arm, texts, size, device)
    started = time.process_time()
    ranks = Ranks(rank=0, size=1, device=device)
    backbone = calibrate_backbone(plan, data, folder, device=device, ranks=ranks)
    whole = target(backbone, "served")
    count = size.guard * len(KINDS)
    first = replace(
        data, held_out_ids=data.held_out_ids[:count], held_out_kinds=data.held_out_kinds[:count]
    )
    small = replace(backbone, data=first)
    source = target(small, "source")
    served = target(small, "served", reference=source)
    seen: list[Any] = []

    def watched(judge: Target, blocks: Sequence[Any]) -> Acceptance:
        seen.append(blocks)
        return acceptance(judge, blocks)

    Held.arm, Held.losses = arm, []
    mtp_policy.Training, mtp_policy.acceptance = Held, watched
    fact, _ = tune(PolicyResults(plan=plan, source=source, served=served), None)
    trained = time.process_time() - started
    untrained, *shares = seen
    judged = {"before": untrained, "all": shares[0]}
    if fact.share < 1:
        judged["chosen"] = shares[SHARES.index(fact.share)]
    found = {name: acceptance(whole, blocks) for name, blocks in judged.items()}
    return {
        "fact": fact.model_dump(mode="json"),
        "losses": Held.losses,
        "seconds": [trained, time.process_time() - started],
        **{name: value.counts[count:].tolist() for name, value in found.items()},
    }


# --- page -----------------------------------------------------------------------------------------


def lines(arm: Arm, found: Mapping[str, Any], size: Size) -> Iterator[str]:
    """Of the table: all of the way, and where the guard's rows choose another share, that."""
    counts = {
        name: Acceptance(torch.tensor(found[name], dtype=torch.float64))
        for name in ("before", "all", "chosen")
        if name in found
    }
    rows = {kind: range(at * size.judged, (at + 1) * size.judged) for at, kind in enumerate(KINDS)}
    fact = found["fact"]
    for name in [*counts][1:]:
        cells, low = [], math.inf
        for own in rows.values():
            before = counts["before"].of_rows(own)
            found_2K = counts[name].of_rows(own).compared(before, (1 + CONFIDENCE) / 2)
            pairs = found_2K.T.tolist()
            low = min(low, *(value - reach for value, reach in pairs))
            cells.append("<br>".join(f"{100 * v:.1f} ± {100 * r:.1f}" for v, r in pairs))
        mean = gains(counts["before"], counts[name], rows, CONFIDENCE, 1)
        share = 1.0 if name == "all" else fact["share"]
        words = [arm.title, ", ".join(arm.kinds), f"{share:.0%}", *cells]
        words += [f"{100 * mean['gain']:.1f}", f"{100 * low:.1f}"]
        written = "yes" if fact["chosen"] else "no"
        words.append(written if share == fact["share"] else "")
        yield f"| {' | '.join(words)} |"


def play(work: Path) -> None:
    """How often the guards take each arm's block, and how often where it is no better."""
    rng = random.Random(0)
    for path in sorted(work.glob("*-runs/*.json")):
        _, of_model = tried(path.parent.name.removesuffix("-runs"))
        found = json.loads(path.read_text())
        sides = [torch.tensor(found[name], dtype=torch.float64) for name in ("before", "all")]
        for size in (16, 32, 64):
            if size <= of_model.judged:
                games = [game(rng, sides, size, of_model.judged) for _ in range(GAMES)]
                shares = [f"{sum(taken) / GAMES:.1%}" for taken in zip(*games, strict=True)]
                print(path.parent.name, path.stem, size, *shares, flush=True)


def game(rng: random.Random, sides: Sequence[Tensor], size: int, judged: int) -> tuple[bool, bool]:
    """Whether the guards take a block on some judged sequences of each kind, and whether they do
    where it is no better: each sequence is the trained block's or the untrained one's, by a coin.
    """
    kinds = {kind: range(at * size, (at + 1) * size) for at, kind in enumerate(KINDS)}
    rows: list[int] = []
    for at in range(len(KINDS)):
        rows += rng.sample(range(at * judged, (at + 1) * judged), size)
    before, after = (side[rows] for side in sides)
    coin = torch.tensor([rng.random() < 0.5 for _ in rows]).view(-1, 1, 1, 1)
    mixed = torch.where(coin, after, before), torch.where(coin, before, after)

    def is_taken(*pair: Tensor) -> bool:
        return gains(*map(Acceptance, pair), kinds, CONFIDENCE, 1)["chosen"]

    return is_taken(before, after), is_taken(*mixed)


def main() -> None:
    """Run what is missing, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "forgetting")
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "tiny-docs")
    parser.add_argument("--page", action="store_true", help="write the page, of what is there")
    parser.add_argument("--wide", action="store_true", help="try rates at eight times the width")
    parser.add_argument("--games", action="store_true", help="play with the guards, and end")
    parser.add_argument("--texts", action="store_true", help="write the texts, and end")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--arms", type=int, nargs="*", help="their numbers, from 0; all by itself")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.device.type == "cpu":
        multiply_in_f32()
    if arguments.games:
        return play(arguments.work)
    texts = arguments.work / "texts"
    if not texts.is_dir():
        texts.mkdir(parents=True)
        write_texts(texts)
    if arguments.texts:
        return
    model = arguments.model
    if arguments.wide:
        model = arguments.work / f"{model.name}-wide"
        if not model.is_dir():
            widen(arguments.model, model, 8)
    arms, size = tried(model.name)
    work = arguments.work / f"{model.name}-runs"
    work.mkdir(exist_ok=True)
    for number, arm in enumerate(arms):
        path = work / f"{arm.key}.json"
        is_asked = arguments.arms is None or number in arguments.arms
        if is_asked and not arguments.page and not path.is_file():
            print(arm.title, *arm.kinds, flush=True)
            with tempfile.TemporaryDirectory() as folder:
                found = run(model, arm, texts, Path(folder), size, arguments.device)
            path.write_text(json.dumps(found))
            print(found["seconds"], found["losses"][:4], found["losses"][-4:])
            print(*lines(arm, found, size), sep="\n", flush=True)
    if arguments.page:
        put_table(table(arguments.work), BEGIN, END)


def put_table(lines: Iterator[str], begin: str, end: str) -> None:
    """Write a table's lines between its marks in docs/quality_rows.md."""
    page = ROOT / "docs" / "quality_rows.md"
    before, _, rest = page.read_text().partition(begin)
    rows = "\n".join(lines)
    page.write_text(f"{before}{begin}\n\n{rows}\n\n{end}{rest.partition(end)[2]}")


def tried(model: str) -> tuple[Sequence[Arm], Size]:
    """What is run with a model, and on how much text: rates on little, where it is wide."""
    if model.endswith("-wide"):
        return RATES, Size(samples=32, guard=4, judged=8, length=128)
    return ARMS, Size()


def table(work: Path) -> Iterator[str]:
    """Of the page: each arm of each model that is there."""
    yield from (HEAD, "|---" * HEAD.count(" | ") + "|---|")
    for folder in sorted(work.glob("*-runs")):
        model = folder.name.removesuffix("-runs")
        arms, size = tried(model)
        for arm in arms:
            path = folder / f"{arm.key}.json"
            if path.is_file():
                for line in lines(arm, json.loads(path.read_text()), size):
                    yield f"| {model} {line}"


if __name__ == "__main__":
    main()
