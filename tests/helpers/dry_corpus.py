"""The corpus that the static check and the dry load are scored on together: right both ways.

In: nothing. Out: `good_cases()`, every family in every form, each to pass without a word, and
`broken_cases()`: those of broken.py, and here what only a dry load can see, each with what a
finding must name.

Easy to get wrong: who must catch a case. Faults of files (cut short, indexed twice over) never
reach vLLM's classes, and vLLM 0.32 forgives a few that others do not: `static` lists them. A
case that the static check catches is loaded all the same: both must be right.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import releases
from broken import BROKEN, GOOD, built
from checkpoint_files import Checkpoint, write
from commands import ROOT
from good import ours, outputs_of, qwen_fp8
from keepmtp.checkpoints.source import open_source
from keepmtp.quantize.plan.choices import choices_of, found_plan
from keepmtp.recipes.conventions import FORMATS, Format
from keepmtp.recipes.errors import RecipeError
from keepmtp.recipes.find import find_recipe
from keepmtp.recipes.schema import Recipe
from keepmtp.recipes.schemes import SCHEMES
from keepmtp.validate.check.check import Checked, examine
from keepmtp.validate.dryload.check_on import with_loads
from keepmtp.validate.dryload.loader import DryLoader, Job
from keepmtp.validate.facts.dry_load import LoadAccount
from modelopt_form import ALGORITHMS, LINEAR_ONLY, in_hf_quant_config, modelopt
from tables import table

By = Literal["static", "dry", "both"]
# Releases that differ from another one in sizes alone.
TWINS = ("dsv4-pro", "deepseek-v3.1", "glm-4.5-air")
# Drafts with a checkpoint of their own: they need a target beside them.
SEPARATE = ("gemma-4-26b-assistant",)
# vLLM builds its attention otherwise than modelopt's config says: plain under NVFP4
# (models/qwen4_exp).
NOT_MODELOPT = ("qwen3.8-flash-next",)
TABLE = table("helpers/dry_corpus")


@dataclass(frozen=True, slots=True, kw_only=True)
class DryCase:
    """One checkpoint, and where it is to be served.

    Attributes:
        build: makes it.
        by: who must catch it: the static check, the dry load, or both; "" for a good one.
        where: words of which one must stand in a finding's place or message.
    """

    name: str
    build: Callable[[], Checkpoint]
    by: By | Literal[""] = ""
    where: tuple[str, ...] = ()
    tp: int = 1
    num_drafts: int = 1


def good_cases() -> Iterator[DryCase]:
    """Every family as released, and quantized in both dialects with its MTP block plain and
    quantized; every scheme.

    A combination that keepmtp refuses to plan (a width that no group fits) is left out.
    """
    for format in FORMATS:
        yield DryCase(name=f"mixed by layer, {format}", build=partial(_mixed, format))
    for name, build in GOOD.items():
        if name.removeprefix("released ") not in SEPARATE:
            yield DryCase(name=name, build=build)
    schemes = [scheme for scheme in SCHEMES if scheme != "NVFP4"]
    algorithms = [each for each in ALGORITHMS if each not in LINEAR_ONLY]
    for number, model in enumerate(
        each for each in releases.MODELS if each not in (*TWINS, *SEPARATE)
    ):
        scheme, algorithm = schemes[number % len(schemes)], algorithms[number % 3]
        forms = {
            "ct, MTP plain": partial(ours, model, "NVFP4"),
            "ct, MTP quantized": partial(ours, model, "NVFP4", "NVFP4"),
            f"ct {scheme}": partial(ours, model, scheme, scheme),
            "modelopt, MTP plain": partial(ours, model, "NVFP4", format="modelopt"),
            "modelopt, MTP quantized": partial(_two_files, model),
            f"modelopt {algorithm}": partial(ours, model, algorithm, algorithm, format="modelopt"),
            "modelopt, two algorithms": partial(ours, model, "FP8_BLOCK", "NVFP4", format="modelopt"),
        }  # fmt: skip
        if model in NOT_MODELOPT:
            del forms["modelopt, MTP quantized"]
        for form, build in forms.items():
            if _is_planned(build):
                yield DryCase(name=f"{model} {form}", build=build)
    for model in ("qwen3.5-text", "mimo-7b"):
        for scheme in LINEAR_ONLY:
            build = partial(ours, model, scheme, scheme, format="modelopt")
            yield DryCase(name=f"{model} modelopt {scheme}", build=build)


def _mixed(format: Format) -> Checkpoint:
    """As a search under a budget may find it: each unit with another word than the one before it,
    in the backbone and in the block.
    """
    recipe = find_recipe("tiny-glm4-moe.nvfp4")[0].model_dump() | {
        "format": format, "backbone": "auto", "mtp": "auto", "budget": "16 bits",
        "backbone_auto": {"candidates": ["NVFP4", "FP8_BLOCK", "bf16"]},
    }  # fmt: skip
    choices = choices_of(Recipe.model_validate(recipe), open_source(ROOT / "models/tiny-glm4-moe"))
    turns = {
        unit.name: unit.options[turn % len(unit.options)].word
        for turn, unit in enumerate(choices.units)
    }
    plan = found_plan(choices, turns, shard_bytes=10**9)
    attention = [
        each for each in plan.tensors if (each.part, each.role) == ("backbone", "attention")
    ]
    assert len({each.scheme for each in attention}) == 3
    return outputs_of(plan)


def _two_files(model: str) -> Checkpoint:
    return in_hf_quant_config(modelopt(model, mtp="NVFP4"))


def broken_cases() -> Iterator[DryCase]:
    """All of broken.py, then the table below."""
    for case in BROKEN:
        yield DryCase(
            name=case.name, build=case.build, where=(case.where,),
            by="static" if case.name in TABLE["static"] else "both",
        )  # fmt: skip
    yield from DRY


def judged(
    cases: Sequence[DryCase], loader: DryLoader, version: str, place: Path
) -> Iterator[tuple[DryCase, Checked, LoadAccount]]:
    """What the static check and one dry load say of each; `place` is an empty folder."""
    folders = [write(place / f"{number:03}", case.build()) for number, case in enumerate(cases)]
    examined = [examine(str(folder), vllm=version) for folder in folders]
    jobs = [
        Job(folder=folder, tp=case.tp, num_drafts=case.num_drafts)
        for folder, case in zip(folders, cases, strict=True)
    ]
    for case, checked, account in zip(cases, examined, loader.load_all(jobs), strict=True):
        yield case, with_loads(checked, [account]), account


def _is_planned(build: Callable[[], Checkpoint]) -> bool:
    try:
        build()
    except RecipeError:
        return False
    return True


def _case(name: str, row: dict[str, Any]) -> DryCase:
    places = {key: row[key] for key in ("tp", "num_drafts") if key in row}
    where, by = tuple(row["where"]), row.get("by", "dry")
    return DryCase(name=name, build=partial(built, row), by=by, where=where, **places)


def _claimed_tower() -> Checkpoint:
    checkpoint = qwen_fp8()
    checkpoint.quantization["modules_to_not_convert"].remove("model.visual.blocks.0.attn.proj")
    return checkpoint


DRY = (
    *itertools.starmap(_case, TABLE["broken"].items()),
    DryCase(
        name="F34 vision tower not ignored",
        build=_claimed_tower,
        by="both",
        where=("visual.blocks.0.attn.proj",),
    ),
)
