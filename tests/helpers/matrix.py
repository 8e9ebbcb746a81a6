"""Which MTP drafts vLLM builds and loads: every family, released and quantized, in two dialects, on
pretended GPUs.

    make matrix        runs all of it and writes docs/matrix.md

In: the layouts of tests/helpers/layouts and tests/helpers/releases. Out: a cell for each
checkpoint, GPU and TP size: "loads", or what the report says instead.
"""

import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import releases
from checkpoint_files import Checkpoint, write
from commands import ROOT
from dry_corpus import SEPARATE
from good import companions, ours
from keepmtp.recipes.errors import RecipeError
from keepmtp.recipes.families import find_family
from keepmtp.validate.check.check import examine
from keepmtp.validate.dryload.check_on import with_loads
from keepmtp.validate.dryload.loader import DryLoader, Job
from keepmtp.validate.facts.dry_load import GPU
from keepmtp.validate.facts.vllm_env import VLLM, find_vllm
from modelopt_form import modelopt

SCHEME = "NVFP4"  # the one that both dialects have for linears and experts alike
INSTEAD = "FP8_DYNAMIC"  # under compressed-tensors, for a family whose modules do not take it
TPS = (1, 4)
COLUMNS = ("sm90", "sm100", "sm120")  # sm89 has a section in docs/dryload.md
DOCS = ROOT / "docs" / "matrix.md"
Cells = dict[tuple[str, str, str, int], str]
"""(model, variant, GPU, TP) -> "loads", or why not."""


def _released(model: str) -> Checkpoint:
    config, tensors = releases.source_layout(model, size="split")
    return Checkpoint(config=config, tensors=dict(tensors), json_files=companions(config))


def _ours(model: str, *, is_mtp_quantized: bool) -> Checkpoint:
    try:
        return ours(model, SCHEME, SCHEME if is_mtp_quantized else "bf16", "split")
    except RecipeError:
        return ours(model, INSTEAD, INSTEAD if is_mtp_quantized else "bf16", "split")


VARIANTS = {
    "released": _released,
    "compressed-tensors, MTP BF16": lambda model: _ours(model, is_mtp_quantized=False),
    "compressed-tensors, MTP quantized": lambda model: _ours(model, is_mtp_quantized=True),
    "modelopt, MTP BF16": lambda model: modelopt(model, SCHEME, "bf16", size="split"),
    "modelopt, MTP quantized": lambda model: modelopt(model, SCHEME, SCHEME, size="split"),
}


def run(gpus: Iterable[GPU], tps: tuple[int, ...], variants: Iterable[str], vllm: VLLM) -> Cells:
    """Judge every combination; one vLLM process a GPU."""
    cells, made, refused = Cells(), {}, {}
    with tempfile.TemporaryDirectory() as scratch:
        for model, variant in (
            (model, variant) for model in releases.MODELS for variant in variants
        ):
            try:
                checkpoint = VARIANTS[variant](model)
            except RecipeError as refusal:
                refused[model, variant] = _plain(f"not made: {refusal}")
            else:
                folder = write(Path(scratch) / f"{len(made)}", checkpoint)
                examined = examine(folder, vllm=vllm.version)
                made[model, variant] = examined, separate_target(model, folder), folder
        for gpu in gpus:
            jobs = [
                Job(folder=target or folder, draft=folder if target else None, tp=tp)
                for _, target, folder in made.values()
                for tp in tps
            ]
            with DryLoader(vllm, gpu=gpu) as loader:
                accounts = iter(loader.load_all(jobs))
            for name, (examined, target, _) in made.items():
                draft = examined.runtime
                checked = examined._replace(runtime=None if target else draft)
                for tp in tps:
                    judged = with_loads(checked, [next(accounts)], draft=draft)
                    findings = judged.data.findings
                    errors = [each.says for each in findings if each.severity == "error"]
                    reason = errors[0].removeprefix(f"on {gpu} at TP {tp}: ") if errors else "loads"
                    cells[*name, gpu, tp] = _plain(reason)
            for name, refusal in refused.items():
                cells |= {(*name, gpu, tp): refusal for tp in tps}
    return cells


def _plain(reason: str) -> str:
    return " ".join(reason.replace("|", "\\|").split())


def separate_target(model: str, folder: Path) -> Path | None:
    """A target for a draft that has a checkpoint of its own."""
    if model not in SEPARATE:
        return None
    config, tensors = releases.target_of(releases.source_layout(model, size="split")[0])
    return releases.write_checkpoint(folder.with_name(f"{folder.name}-target"), config, tensors)


def markdown(cells: Cells, version: str) -> str:
    """The table, and below it every reason once."""
    numbers: dict[str, int] = {}
    rows: dict[tuple[str, str, str], list[str]] = {}
    for (model, variant, _, _), text in cells.items():
        if text != "loads":
            text = f"[{numbers.setdefault(text, len(numbers) + 1)}]"
        family = find_family(releases.MODELS[model], model).model_type
        rows.setdefault((family, model, variant), []).append(text)
    loaded = sum(text == "loads" for text in cells.values())
    columns = " | ".join(f"{gpu} TP{tp}" for gpu in COLUMNS for tp in TPS)
    table = [
        f"| {family} | {model}, {variant} | {' | '.join(texts)} |"
        for (family, model, variant), texts in sorted(rows.items(), key=lambda row: row[0][:2])
    ]
    return f"""\
# What vLLM builds and loads

Written by `make matrix`: vLLM {version}'s own target and draft classes and loaders on meta tensors, from
tiny checkpoints in published names (tests/helpers/layouts). *loads* means: both constructed
and loaded, every parameter written over all its elements, every tensor used, no number cast, and a kernel
for every layer that could be judged. Quantized is {SCHEME} for backbone and, where said, MTP block, and
{INSTEAD} where keepmtp refuses {SCHEME} for the family.
{loaded} of {len(cells)} combinations load; below the table stands why the others do not.

| family | checkpoint | {columns} |
{"|---" * (2 + len(COLUMNS) * len(TPS))}|
{chr(10).join(table)}

{chr(10).join(f"{number}. {reason}" for reason, number in numbers.items())}
"""


def main() -> None:
    vllm = find_vllm()
    cells = run(COLUMNS, TPS, VARIANTS, vllm)
    DOCS.write_text(markdown(cells, vllm.version))
    loaded = sum(text == "loads" for text in cells.values())
    print(f"{DOCS.relative_to(ROOT)}: {loaded} of {len(cells)} load", file=sys.stderr)


if __name__ == "__main__":
    main()
