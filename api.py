"""keepmtp from Python: the verbs that need no server, as functions of values. docs/api.md has an
example of each.

    load_recipe  ->  plan  ->  quantize  ->  check  ->  report, card

In: names, folders and Hub ids as a command line has them. Out: typed values, which know how they
are printed as JSON (`value.model_dump(mode="json")`), and files where a name says so.

A function raises `KeepMTPError` where the command line prints `error:`; its fields say where, which
rule, what is there instead and the cure. Nothing is printed: whoever wants to see a long run passes
`progress`.

Easy to get wrong: `import keepmtp.api` loads nothing of this. A function loads what it needs when
it is called, and a type when it is named.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from .recipes.errors import KeepMTPError, RecipeError
from .recipes.frozen import Say, silent

if TYPE_CHECKING:
    from .pipeline import FinishedRun
    from .quantize.plan.plan import Plan
    from .quantize.run.progress import RunProgress
    from .recipes.frozen import Bar
    from .recipes.runtimes import Runtime
    from .recipes.schema import Recipe
    from .recipes.tensor_parallel import Split
    from .validate.check.check import Checked
    from .validate.check.reading import Level
    from .validate.facts.dry_load import GPU
    from .validate.facts.findings import Finding
    from .validate.facts.results import CheckData
    from .validate.facts.schema import FullReport as Report
    from .validate.report.comparison import Comparison

__all__ = [
    "CheckData",
    "Finding",
    "FinishedRun",
    "KeepMTPError",
    "Plan",
    "Recipe",
    "Report",
    "RunProgress",
    "card",
    "check",
    "check_all",
    "compare",
    "load_recipe",
    "plan",
    "quantize",
    "report",
]
# Type -> its module and its name there.
_TYPES = {
    "CheckData": (".validate.facts.results", "CheckData"),
    "Finding": (".validate.facts.findings", "Finding"),
    "FinishedRun": (".pipeline", "FinishedRun"),
    "Plan": (".quantize.plan.plan", "Plan"),
    "Recipe": (".recipes.schema", "Recipe"),
    "Report": (".validate.facts.schema", "FullReport"),
    "RunProgress": (".quantize.run.progress", "RunProgress"),
}


class RecipeChoices(TypedDict, total=False):
    """What is chosen of a recipe.

    Attributes:
        scheme: another variant of the model, or one scheme for every quantized group.
        mtp: what becomes of the MTP block: source, bf16, auto, or a scheme.
        calibration: the name of a calibration block, for a scheme that needs batches.
    """

    scheme: str | None
    mtp: str | None
    calibration: str | None


class PlanChoices(RecipeChoices, total=False):
    """What is chosen of a plan.

    Attributes:
        source: folder or Hub id of the released checkpoint; default the recipe's.
        mtp_source: folder or Hub id of the MTP block, for a release that has none; default the
            recipe's.
        requantize: weights that a tool has quantized may be rounded again, into another scheme.
        changes: groups of a checkpoint, each as `GROUP=VALUE`; all else stays as it is.
        draft_for: folder or Hub id of a finished checkpoint; the plan is of the MTP block alone, as
            a draft for it.
        changed_only: of a repository of the Hub, only the files that change are read and written.
        trust_remote_code: the checkpoint's own Python may run, where the recipe asks for it.
    """

    source: str | None
    mtp_source: str | None
    requantize: bool
    changes: Sequence[str] | None
    draft_for: str | None
    changed_only: bool
    trust_remote_code: bool


def load_recipe(name: str | Path, **choices: Unpack[RecipeChoices]) -> "Recipe":
    """Read and validate a recipe.

    Args:
        name: a model's name, a recipe's full name, or a recipe file.
        choices: see `RecipeChoices`.

    Raises:
        KeepMTPError: there is no such recipe, or it has a value that is not possible.
    """
    from .recipes.find import find_recipe

    _refuse_other("name", name)
    return find_recipe(str(name), **choices)[0]


def plan(model: str | Path, **choices: Unpack[PlanChoices]) -> "Plan":
    """Decide what becomes of every tensor, from headers alone. No weight is read and nothing is
    written.

    Args:
        model: as for `load_recipe`; or a checkpoint without a recipe: a folder, a Hub id, the
            address of its page.
        choices: see `PlanChoices`.

    Raises:
        KeepMTPError: the recipe does not fit the checkpoint, or the checkpoint cannot be read.
    """
    from . import pipeline

    _refuse_other("model", model)
    made, recipe_text = pipeline.plan_for(str(model), **choices)
    return replace(made, recipe_text=recipe_text)


def quantize(
    planned: "Plan",
    out: str | Path,
    *,
    threads: int | None = None,
    keep_calibration: bool = False,
    progress: "RunProgress | None" = None,
) -> "FinishedRun":
    """Carry out a plan: download, calibrate, write, check, and give the folder its final name.

    A run that was killed is continued by the same call, and the result has the same bytes.

    Args:
        planned: from `plan`.
        out: the folder to write; it must not exist.
        threads: shards written at the same time; default one a core.
        keep_calibration: keep the folder `<out>.calibration` for a run with another MTP policy.
        progress: who is called during the run; default nobody.

    Raises:
        KeepMTPError: before a byte is written; or the checkpoint does not pass its own check.
    """
    from . import pipeline
    from .quantize.plan.plan import Plan
    from .quantize.run.progress import SILENT

    _refuse_other("planned", planned, Plan)
    return pipeline.quantize(
        planned,
        planned.recipe_text,
        out=Path(out),
        threads=threads,
        keep_calibration=keep_calibration,
        progress=progress or SILENT,
    )


def _refuse_other(where: str, value: object, kind: Any = str | Path) -> None:
    """Refuse an argument of another type.

    Raises:
        RecipeError: says what it is.
    """
    if not isinstance(value, kind):
        name = getattr(kind, "__name__", "name or a path")
        raise RecipeError(where, f"must be a {name}", got=repr(value), cure="See docs/api.md")


class Loads(TypedDict, total=False):
    """How a checkpoint is loaded.

    Attributes:
        gpus: GPUs to pretend: sm80 to sm120 (`GPUS`). They need not be there; a vLLM environment
            must.
        tps: tensor-parallel sizes.
        num_drafts: num_speculative_tokens of the dry loads.
        draft: folder or Hub id of a draft that has a checkpoint of its own.
        vllms: versions of the dry loads, "all", or folders and wheels with a vLLM, whose Python
            runs; default the environment's.
        runtimes: the servers that are to load it: "vllm", "sglang". Dry loads are vLLM's alone.
    """

    gpus: "Sequence[GPU]"
    tps: Sequence[int]
    num_drafts: int
    draft: str
    vllms: Sequence[str]
    runtimes: "Sequence[Runtime]"


def check(
    where: str | Path,
    *,
    values: "Level | None" = None,
    source: str | Path | None = None,
    **loads: Unpack[Loads],
) -> "CheckData":
    """Judge one checkpoint by its config.json and headers, with `gpus` by vLLM's loaders, with
    `values` by its bytes.

    Args:
        where: a folder or a Hub id, of keepmtp or of any other tool.
        values: what is read of the tensors: "norms" (of the MTP block), "scalars", "scales",
            "unpacked" or "all". Needs the `quantize` extra.
        source: with `values`, the release as a folder or a Hub id; weights are compared with it.
        loads: see `Loads`; by default the static check alone, by the rules for vLLM.

    Returns: facts, findings and dry loads. `ok` says that no finding is an error.

    Raises:
        KeepMTPError: there is nothing to judge. Files that are broken are findings.
    """
    (checked,) = check_all([where], **loads)
    if checked.refusal is not None:
        raise checked.refusal
    if values is None:
        return checked.data
    from .recipes.extras import require_extra

    require_extra("check", "quantize")
    from .validate.check.values import with_values

    if source is not None:
        source = str(source)
    return with_values(checked, values, source=source).data


def check_all(
    places: Sequence[str | Path],
    *,
    gpus: "Sequence[GPU]" = (),
    tps: "Sequence[int | Split]" = (1,),
    num_drafts: int = 1,
    draft: str = "",
    vllms: Sequence[str] = (),
    runtimes: "Sequence[Runtime]" = ("vllm",),
    progress: Say = silent,
) -> "Iterator[Checked]":
    """Judge several checkpoints, one after the other; see `check`. vLLM starts once for all of
    them.

    `vllms` are versions of the dry loads, "all", or folders and wheels with a vLLM, whose Python
    runs; default the environment's. Of `tps`, one may be a `Split` of recipes/tensor_parallel.py.
    `progress` is called with what is done now.

    Yields: for each place in order `data`, or a `refusal` if there is nothing to judge.
    """
    from .recipes.tensor_parallel import Split
    from .validate.dryload.check_on import check_on
    from .validate.dryload.versions import had_vllms
    from .validate.facts.vllm_env import find_vllm

    chosen = missing = []
    if gpus:
        chosen, missing = had_vllms(vllms, find_vllm(), progress=progress)
    loaded = check_on(
        [str(place) for place in places],
        vllms=chosen,
        gpus=gpus,
        splits=[Split(tp) if isinstance(tp, int) else tp for tp in tps],
        num_drafts=num_drafts,
        draft=draft,
        runtimes=runtimes,
        progress=progress,
    )
    for checked in loaded:
        yield checked._replace(unjudged=(*missing, *checked.unjudged))


def compare(places: Sequence[str | Path], *, progress: Say = silent) -> "Comparison":
    """Lay finished checkpoints of one model next to each other. No GPU is needed, and nothing is
    written.

    Args:
        places: folders or Hub ids.
        progress: is called with what is done now.

    Raises:
        KeepMTPError: one cannot be read, or is of another model.
    """
    from .validate.report import comparison

    return comparison.compare(places, progress=progress)


def report(path: str | Path) -> "Report":
    """Read everything that was measured on a checkpoint, and compare it with the files that it was
    made from.

    Args:
        path: a checkpoint's folder NAME or its NAME.report, whose report.json is made anew from the
            result files there; or a report.json.

    Raises:
        KeepMTPError: there is none, or its numbers are not those of the result files.
    """
    from .validate.facts.results import results_of
    from .validate.report.report import read_json, refresh

    _refuse_other("path", path)
    results = results_of(Path(path))
    if results is None:
        return read_json(Path(path))
    return refresh(results)


def card(
    checkpoint: str | Path,
    *,
    source: str | Path | None = None,
    base_model: str | None = None,
    license_id: str | None = None,
    out: str | Path | None = None,
    progress: "Bar | None" = None,
) -> "tuple[Path, Report]":
    """Write a checkpoint's model card from its measurements. Needs the `report` extra.

    Args:
        checkpoint: the folder NAME; what was measured on it is in NAME.report.
        source: folder of what it was made from, for license, language and task; default what its
            record names, if that is here.
        base_model: ORG/NAME on the Hub that it was made from.
        license_id: as the Hub names it.
        out: where the card goes; default NAME.card.
        progress: called with the number of bytes that are hashed; see `RunProgress.packing`.

    Returns: the card's folder, and the report that it was made from.

    Raises:
        KeepMTPError: the bytes or the numbers are not those that were measured, or something is not
            known.
    """
    from .checkpoints.source_of import folder_it_was_made_from
    from .validate.report import card as cards

    _refuse_other("checkpoint", checkpoint)
    # Only the record of a checkpoint without a named source is read.
    made_from = Path(source) if source else folder_it_was_made_from(Path(checkpoint))
    if out is not None:
        out = Path(out)
    return cards.build(
        Path(checkpoint),
        source=made_from,
        base_model=base_model,
        license_id=license_id,
        out=out,
        watch=progress,
    )


def __getattr__(name: str) -> Any:
    """A type, imported when it is named."""
    if name not in _TYPES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, real_name = _TYPES[name]
    return getattr(import_module(module, __package__), real_name)


def __dir__() -> list[str]:
    """The functions and the types, those too that were not named yet."""
    return sorted({*globals(), *__all__})
