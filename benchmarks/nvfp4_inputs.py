"""What NVFP4 loses by rounding inputs to four bits, and what wins it back: docs/quality_rows.md.

    python benchmarks/nvfp4_inputs.py            runs what is missing and prints it
    python benchmarks/nvfp4_inputs.py --model DIR     the same with another model of tiny-docs' form
    python benchmarks/nvfp4_inputs.py --page     writes the table, of every model that was run

In: `ARMS`, each a recipe, and `SHAPES` of outlier channels, which are put into a model without
changing what it computes. Out: a table of the divergence from the release on two kinds of text,
beside plain NVFP4's on the same sequences, with 95 % intervals.

Easy to get wrong: outliers. tiny-docs has them made by hand, and a smoothing undoes them; so every
row is judged without any too, and with those that are reported of large models.
"""

import argparse
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from f32_products import multiply_in_f32
from forgetting import put_table, texts_of, write_texts
from judge import Judge
from keepmtp.checkpoints.source import open_source
from keepmtp.quantize.calibrate.data.data import calibration_data
from keepmtp.quantize.plan.choices import choices_of
from keepmtp.recipes.find import find_recipe
from keepmtp.recipes.schema import Recipe
from outliers import with_outliers
from quality import counts, in_child
from quality_page import divergence, features, jackknife, kept, ratio
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).parent.parent
TEXTS = ROOT / "build" / "forgetting" / "texts"
JUDGED = ("docs", "code")
SEQUENCES = 48
TRAINED = 16.0, 32  # how models/train makes outliers: so many times larger, one in so many channels
SHAPES: Mapping[str, tuple[float, int] | None] = {
    "none": None,
    "1 in 256, 32 times": (32.0, 256),
    "1 in 32, 16 times": TRAINED,
}
"""What outliers are put in: how many times larger, one in how many channels.

LLM.int8() (arXiv 2208.07339) reports one channel in a thousand, up to 20 times; SmoothQuant (arXiv
2211.10438) a few, about 100 times.
"""
BEGIN, END = "<!-- begin inputs -->", "<!-- end of inputs -->"
HEAD = "| model | outliers | variant | docs, 10^-3 | of NVFP4's | code, 10^-3 | of NVFP4's | k=1, docs | code | time |"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way to write the backbone.

    Attributes:
        calibration: keys of the recipe's block.
        scheme: of the whole backbone.
        between: of the bytes between NVFP4 and FP8 that a search may spend on FP8.
        factor: on the largest input that the file speaks of.
    """

    title: str
    calibration: Mapping[str, Any] = field(default_factory=dict)
    scheme: str = "NVFP4"
    between: float | None = None
    factor: float = 1.0


ARMS = {
    "nvfp4": Arm(title="NVFP4"),
    "a16": Arm(title="16-bit inputs", scheme="NVFP4A16"),
    "fp8": Arm(title="FP8, a scale a row", scheme="FP8_DYNAMIC"),
    "half": Arm(title="largest input halved", factor=0.5),
    "double": Arm(title="largest input doubled", factor=2.0),
    "gptq": Arm(title="GPTQ", calibration={"algorithm": "gptq"}),
    "smoothquant": Arm(title="SmoothQuant", calibration={"algorithm": "smoothquant"}),
    "awq": Arm(title="AWQ", calibration={"algorithm": "awq"}),
    "mix10": Arm(title="FP8 for a few, 10 % of the way", between=0.1),
    "mix25": Arm(title="FP8 for a few, 25 % of the way", between=0.25),
}


def main() -> None:
    """Run what is missing, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "inputs")
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "tiny-docs")
    parser.add_argument("--page", action="store_true", help="write the page, of what is there")
    arguments = parser.parse_args()
    if arguments.page:
        return put_table(table(arguments.work), BEGIN, END)
    torch.set_num_threads(1)
    os.environ["HF_HUB_OFFLINE"] = "1"
    multiply_in_f32()
    if not TEXTS.is_dir():
        TEXTS.mkdir(parents=True)
        write_texts(TEXTS)
    for number, shape in enumerate(SHAPES):
        run(arguments.model.resolve(), shape, arguments.work / f"{arguments.model.name}-{number}")


# --- runs -----------------------------------------------------------------------------------------


def run(model: Path, shape: str, work: Path) -> None:
    """Every arm on a model with outliers of this shape."""
    missing = [key for key in ARMS if not (work / f"{key}.json").is_file()]
    if not missing:
        return
    work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=work) as name:
        folder = Path(name)
        release = shaped(model, SHAPES[shape], folder / "release")
        judges = {}
        for text in JUDGED:
            recipe = recipe_of(ARMS["nvfp4"], f"{text}-judged", samples=1, held_out=SEQUENCES)
            data = calibration_data(recipe.calibration, open_source(release))
            judges[text] = Judge(release, recipe, data, folder / f"states-{text}")
        whole = {text: counts(judge.release) for text, judge in judges.items()}
        (work / "release.json").write_text(json.dumps(whole | {"shape": shape}))
        for key in missing:
            seconds = written(ARMS[key], release, folder / key)
            found = {text: counts(judge.read(folder / key)) for text, judge in judges.items()}
            (work / f"{key}.json").write_text(json.dumps(found | {"seconds": seconds}))
            shutil.rmtree(folder / key)
            print(model.name, shape, key, f"{seconds:.0f} s", flush=True)


def shaped(model: Path, outliers: tuple[float, int] | None, out: Path) -> Path:
    """A copy of a model of models/train with other outliers; it computes the same."""
    shutil.copytree(model, out)
    width = json.loads((out / "config.json").read_text())["hidden_size"]
    files = {file: load_file(file) for file in out.glob("*.safetensors")}
    tensors = {name: tensor for own in files.values() for name, tensor in own.items()}
    factor, apart = TRAINED
    tensors = with_outliers(tensors, channels=range(8, width, apart), factor=1 / factor)
    if outliers is not None:
        factor, apart = outliers
        tensors = with_outliers(tensors, channels=range(8, width, apart), factor=factor)
    for file, own in files.items():
        save_file({name: tensors[name] for name in own}, file, metadata={"format": "pt"})
    return out


def written(arm: Arm, release: Path, out: Path) -> float:
    """Write an arm's checkpoint; the processor seconds that it took."""
    recipe = recipe_of(arm, "docs", samples=64, held_out=1 if arm.between is None else 32)
    document = recipe.model_dump(mode="json")
    if arm.between is not None:
        words = ["NVFP4", "FP8_DYNAMIC"]
        document |= {"backbone": "auto", "backbone_auto": {"candidates": words}, "budget": "1GiB"}
        choices = choices_of(Recipe.model_validate(document), open_source(release))
        low, high = (choices.num_bytes(choices.uniform(word)) for word in words)
        document["budget"] = f"{(low + arm.between * (high - low)) / 2**20:.3f}MiB"
    file = out.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(document, sort_keys=False))
    words = ["keepmtp", "quantize", str(file), "--source", str(release), "--out", str(out)]
    seconds = in_child(words, out.with_suffix(".log"))
    for shard in out.glob("*.safetensors") if arm.factor != 1 else ():
        tensors = load_file(shard)
        for name in tensors:
            if name.endswith("input_global_scale"):  # a divisor
                tensors[name] /= arm.factor
        save_file(tensors, shard, metadata={"format": "pt"})
    return seconds


def recipe_of(arm: Arm, text: str, **sizes: int) -> Recipe:
    """tiny-docs' own NVFP4 recipe with the arm's keys."""
    document = find_recipe("tiny-docs", scheme="nvfp4")[0].model_dump(mode="json")
    document["backbone"] = dict.fromkeys(document["backbone"], arm.scheme)
    texts = texts_of(TEXTS, text) | {"sequence_length": 256, "batch_size": 8}
    document["calibration"] |= texts | sizes | dict(arm.calibration)
    if arm.scheme != "NVFP4":
        document["calibration"] = None
    return Recipe.model_validate(document)


# --- page -----------------------------------------------------------------------------------------


def table(work: Path) -> Iterator[str]:
    """Of the page: each arm of each model and shape that is there."""
    yield from (HEAD, "|---" * HEAD.count(" | ") + "|---|")
    for folder in sorted(work.iterdir()):
        stored = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
        release = stored["release"]
        for key, arm in ARMS.items():
            if key not in stored:
                continue
            cells = [folder.name.rpartition("-")[0], release["shape"], arm.title]
            drafts = []
            for text in JUDGED:
                own = stored[key][text]
                value, reach = jackknife(features(own), divergence)
                cells.append(f"{1000 * value:.1f} ± {1000 * reach:.1f}")
                value, reach = ratio(own, stored["nvfp4"][text], divergence)
                cells.append("" if key == "nvfp4" else f"{value:.2f} ± {reach:.2f}")
                value, reach = kept(own, release[text], 1)
                drafts.append(f"{100 * value:.1f} ± {100 * reach:.1f}")
            time = stored[key]["seconds"] / stored["nvfp4"]["seconds"]
            yield "| " + " | ".join([*cells, *drafts, f"{time:.1f}"]) + " |"


if __name__ == "__main__":
    main()
