"""Which MTP drafts vLLM builds and loads: every family, released and quantized, in two dialects, on
pretended GPUs.

    make docs        runs all of it and writes docs/tables/matrix.md

In: the layouts of tests/helpers/layouts and tests/helpers/releases. Out: a cell for each
checkpoint, GPU and TP size: "loads", "loads with cures" (keepmtp's, of vLLM's own defects) and what
the report says without them, or what it says instead.
"""

import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import releases
from checkpoint_files import Checkpoint, write
from commands import ROOT
from dry_corpus import SEPARATE
from foreign_form import modelopt
from good import companions, ours, planned
from keepmtp.quantize.plan.decide import Decisions
from keepmtp.recipes.errors import RecipeError
from keepmtp.recipes.families import find_family
from keepmtp.validate.check.check import examine
from keepmtp.validate.dryload.check_on import Case, load_with_cures, with_loads
from keepmtp.validate.dryload.loader import DryLoader, Job
from keepmtp.validate.facts.dry_load import GPU
from keepmtp.validate.facts.findings import errors_of
from keepmtp.validate.facts.vllm_env import VLLM, find_vllm
from pages import numbered, table, with_part

SCHEME = "NVFP4"  # the one that both dialects have for linears and experts alike
INSTEAD = "FP8_DYNAMIC"  # under compressed-tensors, for a family whose modules do not take it
TPS = (1, 4)
COLUMNS = ("sm90", "sm100", "sm120")  # sm80 to sm89 are in docs/schemes.md
DOCS = ROOT / "docs" / "tables" / "matrix.md"
LOADS, CURED, REFUSED = "loads", "loads with cures", "not made: "
Cells = dict[tuple[Any, ...], str]
"""(model, variant, GPU, TP) -> LOADS, CURED and why not without, or why not."""


def _released(model: str) -> Checkpoint:
    config, tensors = releases.source_layout(model, size="split")
    return Checkpoint(config=config, tensors=dict(tensors), json_files=companions(config))


def _ours(model: str, *, is_mtp_quantized: bool) -> Checkpoint:
    try:
        return ours(model, SCHEME, SCHEME if is_mtp_quantized else "bf16", "split")
    except RecipeError:
        return ours(model, INSTEAD, INSTEAD if is_mtp_quantized else "bf16", "split")


def _others(model: str, mtp: str) -> Checkpoint:
    """An export of modelopt; where keepmtp's plan refuses the scheme, that of a tool that does not
    ask which schemes vLLM takes.
    """
    try:
        return modelopt(model, SCHEME, mtp, size="split")
    except RecipeError:
        with mock.patch.object(Decisions, "_misfits", lambda *place: iter(())):
            checkpoint = modelopt(model, SCHEME, mtp, size="split")
        planned.cache_clear()  # keepmtp's own plan is refused as before
        return checkpoint


VARIANTS = {
    "released": _released,
    "compressed-tensors, MTP BF16": lambda model: _ours(model, is_mtp_quantized=False),
    "compressed-tensors, MTP quantized": lambda model: _ours(model, is_mtp_quantized=True),
    "modelopt, MTP BF16": lambda model: _others(model, "bf16"),
    "modelopt, MTP quantized": lambda model: _others(model, SCHEME),
}


def of_variant(model: str, variant: str) -> Checkpoint:
    return VARIANTS[variant](model)


def run(
    checkpoints: Iterable[tuple[str, ...]],
    gpus: Iterable[GPU],
    tps: tuple[int, ...],
    vllm: VLLM,
    make: Callable[..., Checkpoint] = of_variant,
) -> Cells:
    """Judge each (model, variant) on every GPU at every TP size; one vLLM process a GPU. `make`
    says what a name's checkpoint is; a name begins with a model.
    """
    cells, made, refused = Cells(), {}, {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in checkpoints:
            try:
                checkpoint = make(*name)
            except RecipeError as refusal:
                refused[name] = _plain(f"{REFUSED}{refusal}")
            else:
                folder = write(Path(scratch) / f"{len(made)}", checkpoint)
                examined = examine(folder, vllm=vllm.version)
                made[name] = examined, separate_target(name[0], folder), folder
        for gpu in gpus:
            cases = dict[tuple[Any, ...], Case]()
            for name, (examined, target, folder) in made.items():
                checked = examined
                if target:
                    checked = examined._replace(runtime=None, draft=examined.runtime)
                for tp in tps:
                    draft = folder if target else None
                    job = Job(folder=target or folder, draft=draft, tp=tp, method=checked.method)
                    cases[*name, gpu, tp] = job, checked
            with DryLoader(vllm, gpu=gpu) as loader:
                accounts = load_with_cures(loader, [*cases.values()])
            for (place, (job, checked)), account in zip(cases.items(), accounts, strict=True):
                errors = errors_of(with_loads(checked, [account]).data.findings)
                text = LOADS
                if errors:
                    text = errors[0].says.removeprefix(f"on {gpu} at TP {job.tp}: ")
                if account.load.cures:
                    text = f"{CURED}: {text}"
                cells[place] = _plain(text)
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
        reason = text.removeprefix(f"{CURED}: ")
        if text != LOADS:
            number = f"[{numbers.setdefault(reason, len(numbers) + 1)}]"
            text = number if text == reason else f"{CURED} {number}"
        family = find_family(releases.MODELS[model], model).model_type
        rows.setdefault((family, model, variant), []).append(text)
    loaded, cured = counted(cells)
    columns = [f"{gpu} TP{tp}" for gpu in COLUMNS for tp in TPS]
    lines = []
    for (family, model, variant), texts in sorted(rows.items(), key=lambda row: row[0][:2]):
        lines.append([family, f"{model}, {variant}", *texts])
    return f"""\
With vLLM {version} as it is {loaded} of {len(cells)} combinations load, and {loaded + cured} with keepmtp's cures of its defects.

{table(["family", "checkpoint", *columns], lines)}

{numbered(numbers)}"""


def counted(cells: Cells) -> tuple[int, int]:
    """How many load as vLLM is, and how many with cures alone."""
    kinds = Counter(text.partition(":")[0] for text in cells.values())
    return kinds[LOADS], kinds[CURED]


def main() -> None:
    vllm = find_vllm()
    cells = run(product(releases.MODELS, VARIANTS), COLUMNS, TPS, vllm)
    DOCS.write_text(with_part(DOCS, markdown(cells, vllm.version)))
    loaded, cured = counted(cells)
    told = f"{loaded} of {len(cells)} load, {loaded + cured} with cures"
    print(f"{DOCS.relative_to(ROOT)}: {told}", file=sys.stderr)


if __name__ == "__main__":
    main()
