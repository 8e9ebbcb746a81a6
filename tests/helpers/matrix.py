"""Which MTP drafts vLLM builds and loads: every family, released and quantized, in two dialects, on
pretended GPUs.

    make matrix        runs all of it and writes docs/matrix.md

In: the layouts of tests/helpers/layouts and tests/helpers/releases. Out: a cell for each
checkpoint, GPU and TP size: "loads", or what the report says instead.
"""

import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import releases
from checkpoint_files import Checkpoint, write
from dry_corpus import SEPARATE
from good import companions, ours
from keepmtp.recipes.errors import RecipeError
from keepmtp.recipes.families import find_family
from keepmtp.validate.check.check import examine
from keepmtp.validate.dryload.check_on import with_loads
from keepmtp.validate.dryload.loader import DryLoader, Job
from keepmtp.validate.facts.dry_load import GPU
from keepmtp.validate.facts.results import CheckData
from keepmtp.validate.facts.vllm_env import find_vllm
from modelopt_form import modelopt

SCHEME = "NVFP4"  # the one that both dialects have for linears and experts alike
INSTEAD = "FP8_DYNAMIC"  # under compressed-tensors, for a family whose modules do not take it
TPS = (1, 4)
COLUMNS: tuple[GPU, ...] = ("sm90", "sm100", "sm120")  # sm89 has a section in docs/dryload.md
DOCS = Path(__file__).parent.parent.parent / "docs" / "matrix.md"


def _released(model: str) -> Checkpoint:
    config, tensors = releases.source_layout(model, size="split")
    return Checkpoint(config=config, tensors=dict(tensors), json_files=companions(config))


def _ours(model: str, *, is_mtp_quantized: bool) -> Checkpoint:
    try:
        return ours(model, SCHEME, SCHEME if is_mtp_quantized else "bf16", "split")
    except RecipeError:
        return ours(model, INSTEAD, INSTEAD if is_mtp_quantized else "bf16", "split")


VARIANTS: dict[str, Callable[[str], Checkpoint]] = {
    "released": _released,
    "compressed-tensors, MTP BF16": lambda model: _ours(model, is_mtp_quantized=False),
    "compressed-tensors, MTP quantized": lambda model: _ours(model, is_mtp_quantized=True),
    "modelopt, MTP BF16": lambda model: modelopt(model, SCHEME, "bf16", size="split"),
    "modelopt, MTP quantized": lambda model: modelopt(model, SCHEME, SCHEME, size="split"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One checkpoint on one GPU at one TP size; `data` is None where keepmtp refuses to make the
    checkpoint.
    """

    family: str
    model: str
    variant: str
    gpu: GPU
    tp: int
    data: CheckData | None
    refusal: str = ""

    @property
    def text(self) -> str:
        """What stands in the table: "loads", or why not."""
        if self.data is None:
            return f"not made: {self.refusal}"
        errors = [finding for finding in self.data.findings if finding.severity == "error"]
        return "loads" if not errors else errors[0].says.partition(": ")[2] or errors[0].says


def run(
    models: Iterable[str],
    gpus: Iterable[GPU] = COLUMNS,
    tps: Iterable[int] = TPS,
    variants: Iterable[str] = tuple(VARIANTS),
) -> Iterator[Cell]:
    """Judge every combination; one vLLM process a GPU."""
    vllm = find_vllm()
    tps = tuple(tps)
    with tempfile.TemporaryDirectory() as scratch:
        made: list[tuple[str, str, Path, Path | None]] = []
        refused: list[tuple[str, str, str]] = []
        for model in models:
            for variant in variants:
                try:
                    checkpoint = VARIANTS[variant](model)
                except RecipeError as refusal:
                    refused.append((model, variant, str(refusal)))
                else:
                    folder = write(Path(scratch) / f"{model}-{len(made)}", checkpoint)
                    made.append((model, variant, folder, _target(model, folder)))
        examined = {folder: examine(folder) for _, _, folder, _ in made}
        for gpu in gpus:
            with DryLoader(vllm, gpu=gpu) as loader:
                jobs = [
                    Job(folder=target or folder, draft=folder if target else None, tp=tp)
                    for _, _, folder, target in made
                    for tp in tps
                ]
                accounts = iter(loader.load_all(jobs))
            for model, variant, folder, target in made:
                draft = examined[folder].runtime
                checked = examined[folder]._replace(runtime=None if target else draft)
                for tp in tps:
                    data = with_loads(checked, [next(accounts)], vllm.version, draft=draft).data
                    yield Cell(
                        family=family_of(model),
                        model=model,
                        variant=variant,
                        gpu=gpu,
                        tp=tp,
                        data=data,
                    )
            for model, variant, refusal in refused:
                for tp in tps:
                    yield Cell(
                        family=family_of(model),
                        model=model,
                        variant=variant,
                        gpu=gpu,
                        tp=tp,
                        data=None,
                        refusal=refusal,
                    )


def _target(model: str, folder: Path) -> Path | None:
    """A target for a draft that has a checkpoint of its own."""
    if model not in SEPARATE:
        return None
    config, tensors = releases.target_of(releases.source_layout(model, size="split")[0])
    return releases.write_checkpoint(folder.with_name(f"{folder.name}-target"), config, tensors)


def family_of(model: str) -> str:
    return find_family(releases.MODELS[model], model).model_type


def markdown(cells: list[Cell], version: str) -> str:
    """The table, and below it every reason once."""
    reasons: dict[str, int] = {}
    rows: dict[tuple[str, str, str], dict[tuple[str, int], str]] = {}
    for cell in cells:
        text = (
            "loads"
            if cell.text == "loads"
            else f"[{reasons.setdefault(cell.text, len(reasons) + 1)}]"
        )
        rows.setdefault((cell.family, cell.model, cell.variant), {})[cell.gpu, cell.tp] = text
    columns = [(gpu, tp) for gpu in COLUMNS for tp in TPS]
    loaded = sum(1 for cell in cells if cell.text == "loads")
    lines = [
        "# What vLLM builds and loads",
        "",
        (
            f"Written by `make matrix`: vLLM {version}'s own target and draft classes and "
            "loaders on "
            "meta tensors, from"
        ),
        (
            "tiny checkpoints in published names (tests/helpers/layouts). *loads* means: both "
            "constructed"
        ),
        (
            "and loaded, every parameter written over all its elements, every tensor used, no "
            "number "
            "cast, and a kernel"
        ),
        (
            f"for every layer that could be judged. Quantized is {SCHEME} for backbone and, where "
            "said, MTP block, and"
        ),
        f"{INSTEAD} where keepmtp refuses {SCHEME} for the family.",
        (
            f"{loaded} of {len(cells)} combinations load; below the table stands why the others do "
            "not."
        ),
        "",
        "| family | checkpoint | " + " | ".join(f"{gpu} TP{tp}" for gpu, tp in columns) + " |",
        "|---" * (2 + len(columns)) + "|",
    ]
    for (family, model, variant), found in sorted(
        rows.items(), key=lambda row: (row[0][0], row[0][1])
    ):
        texts = " | ".join(found.get(column, "") for column in columns)
        lines.append(f"| {family} | {model}, {variant} | {texts} |")
    lines += ["", *(f"{number}. {plain(reason)}" for reason, number in reasons.items()), ""]
    return "\n".join(lines)


def plain(reason: str) -> str:
    return " ".join(reason.replace("|", "\\|").split())


def main() -> None:
    models = sys.argv[1:] or list(releases.MODELS)
    cells = []
    for cell in run(models):
        cells.append(cell)
        if cell.text != "loads":
            print(
                f"{cell.model}, {cell.variant}, {cell.gpu} TP{cell.tp}: {cell.text}",
                file=sys.stderr,
            )
    text = markdown(cells, find_vllm().version)
    if sys.argv[1:]:
        print(text)
    else:
        DOCS.write_text(text)
        print(
            f"{DOCS.relative_to(os.getcwd())}: {sum(cell.text == 'loads' for cell in cells)} of "
            f"{len(cells)} load"
        )


if __name__ == "__main__":
    main()
