"""The corpus that the static check and the dry load are scored on together: right both ways.

In: nothing. Out: `good_cases()`, every family in every form, each to pass without a word, and
`broken_cases()`: those of broken.py, and here what only a dry load can see, each with what a
finding must name.

Easy to get wrong: who must catch a case. Faults of files (cut short, indexed twice over) never
reach vLLM's classes, and vLLM 0.32 forgives a few that others do not: STATIC_ONLY lists them. A
case that the static check catches is loaded all the same: both must be right.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import releases
import yaml
from broken import BROKEN, GOOD
from checkpoint_files import (
    Change,
    Checkpoint,
    adding,
    both,
    groups,
    ignoring,
    lose,
    pack,
    renaming,
    retyping,
    setting,
)
from commands import ROOT
from good import ours, outputs_of, qwen_fp8, released
from keepmtp.checkpoints.source import open_source
from keepmtp.quantize.plan.choices import choices_of, found_plan
from keepmtp.recipes.conventions import FORMATS, Format
from keepmtp.recipes.errors import RecipeError
from keepmtp.recipes.find import find_recipe
from keepmtp.recipes.schema import Recipe
from keepmtp.recipes.schemes import SCHEMES
from modelopt_form import ALGORITHMS, LINEAR_ONLY, in_hf_quant_config, modelopt

By = Literal["static", "dry", "both"]
# Releases that differ from another one in sizes alone.
TWINS = ("dsv4-pro", "deepseek-v3.1", "glm-4.5-air")
# Drafts with a checkpoint of their own: they need a target beside them.
SEPARATE = ("gemma-4-26b-assistant",)
# vLLM builds its attention otherwise than modelopt's config says: plain under NVFP4
# (models/qwen4_exp).
NOT_MODELOPT = ("qwen3.8-flash-next",)
# What vLLM's classes never see, or forgive in 0.32.
STATIC_ONLY = frozenset({
    "E10 copies missing", "Fp2 block scales in BF16", "Fp4 scale_fmt lost", "R5 two configs, two algorithms",
    "M8 index names a missing tensor",
    "R6 shard cut short", "R8 a family without a table", "R8 a dialect that is not judged",
})  # fmt: skip


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
        forms: dict[str, Callable[[], Checkpoint]] = {
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
            by="static" if case.name in STATIC_ONLY else "both",
        )  # fmt: skip
    yield from DRY


def _is_planned(build: Callable[[], Checkpoint]) -> bool:
    try:
        build()
    except RecipeError:
        return False
    return True


def _case(
    name: str, base: str | Callable[[], Checkpoint], change: Change, *where: str, by: By = "dry", tp: int = 1,
    k: int = 1,
) -> DryCase:  # fmt: skip
    def build() -> Checkpoint:
        checkpoint = GOOD[base]() if isinstance(base, str) else base()
        change(checkpoint)
        return checkpoint

    return DryCase(name=name, build=build, by=by, where=where, tp=tp, num_drafts=k)


def _rows() -> Iterator[DryCase]:
    kinds: dict[str, Callable[..., Change]] = {
        "set": setting, "lose": lose, "retype": retyping, "rename": renaming, "pack": pack, "ignore": ignoring,
        "say": lambda entries: lambda c: c.quantization.update(entries), "serve": both,
        "say of weights": lambda entries: groups(lambda g: g["weights"].update(entries)),
        "hide": lambda pattern: lambda c: setattr(c, "elsewhere", c.take(pattern)),
    }  # fmt: skip
    for kind, rows in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text()).items():
        for row in rows:
            change = kinds[kind](*row.pop("change", ()))
            yield _case(row.pop("name"), row.pop("base"), change, *row.pop("where"), **row)


DRY: tuple[DryCase, ...] = (
    *_rows(),
    _case("R3 up_proj left plain beside gate_proj", "glm nvfp4",
          both(lose(r"model\.layers\.3\.mlp\.shared_experts\.up_proj\..*"),
               adding("model.layers.3.mlp.shared_experts.up_proj.weight", "BF16", (128, 256))),
          "model.layers.3.mlp.shared_experts.up_proj", by="both"),
    _case("M2 scale of an expert too narrow", "v3 modelopt",
          retyping(r"model\.layers\.1\.mlp\.experts\.2\.down_proj\.weight_scale", shape=lambda n, k: (n, k // 2)),
          "model.layers.1.mlp.experts.2.down_proj", by="both"),
    _case("M2 an expert too short", "glm fp8",
          retyping(r"model\.layers\.1\.mlp\.experts\.0\.up_proj\.weight", shape=lambda n, k: (n // 2, k)),
          "model.layers.1.mlp.experts.", by="both"),
    _case("M2 a plain expert of the draft too short", "glm-5 nvfp4",
          retyping(r"model\.layers\.3\.mlp\.experts\.1\.gate_proj\.weight", shape=lambda n, k: (n // 2, k)),
          "model.layers.3.mlp.experts.1", by="both"),
    _case("E8 one row lost", "glm fp8", retyping(r"model\.layers\.3\.eh_proj\.weight", shape=lambda n, k: (n - 1, k)),
          "model.layers.3.eh_proj"),
    _case("E8 eh_proj transposed", "v3 nvfp4",
          retyping(r"model\.layers\.3\.eh_proj\.weight", shape=lambda n, k: (k, n)), "model.layers.3.eh_proj"),
    _case("E8 norm of two", "next nvfp4", retyping(r"mtp\.pre_fc_norm_hidden\.weight", shape=lambda n: (2, n)),
          "mtp.pre_fc_norm_hidden"),
    _case("E2 stack of fewer experts", "released qwen3.5-397b",
          retyping(r".*\.layers\.1\.mlp\.experts\.gate_up_proj", shape=lambda e, n, k: (e - 1, n, k)),
          "model.language_model.layers.1.mlp.experts", by="both"),
    _case("E8 stack transposed", "released qwen3.5-397b",
          retyping(r".*\.layers\.1\.mlp\.experts\.down_proj", shape=lambda e, n, k: (e, k, n)),
          "model.language_model.layers.1.mlp.experts.down_proj"),
    _case("E8 gate without up", "released qwen3.5-397b",
          retyping(r".*\.layers\.1\.mlp\.experts\.gate_up_proj", shape=lambda e, n, k: (e, n // 2, k)),
          "model.language_model.layers.1.mlp.experts.gate_up_proj"),
    _case("F34 vision tower not ignored", qwen_fp8, lambda c: c.quantization["modules_to_not_convert"].remove(
          "model.visual.blocks.0.attn.proj"), "visual.blocks.0.attn.proj"),
    _case("F35 wildcard leaves a quantized draft plain", lambda: modelopt("qwen3-next-80b", mtp="NVFP4"),
          lambda c: c.quantization["ignore"].append("mtp*"), "mtp.", by="both"),
    _case("F25 shards of one module in two algorithms", "glm mixed",
          lambda c: c.quantization["quantized_layers"].update({
              "model.layers.1.self_attn.q_proj": {"quant_algo": "FP8"},
              "model.layers.1.self_attn.k_proj": {"quant_algo": "NVFP4"},
              "model.layers.1.self_attn.qkv_proj": {"quant_algo": "NVFP4"}}),
          "model.layers.1.self_attn", by="both"),
    _case("G6 V4's draft ignored by its name on disk", lambda: ours("dsv4-flash", "FP8_BLOCK"),
          both(groups(lambda g: g.update(targets=["Linear"])), ignoring(r"re:^mtp\.0\.", without=r"layers\\\.\(?:?3")),
          "mtp.0.", by="both"),
    _case("F41 three drafts from two layers", lambda: released("glm-4.7", num_nextn_predict_layers=2), both(),
          "n_predict", "num_nextn_predict_layers", k=3),
)  # fmt: skip
