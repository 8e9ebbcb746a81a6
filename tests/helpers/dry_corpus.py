"""The corpus that the static check and the dry load are scored on together: right both ways.

In: nothing. Out: `good_cases()`, every family in every form, each to pass without a word, and
`broken_cases()`: those of broken.py, and here what only a dry load can see, each with what a
finding must name.

Easy to get wrong: who must catch a case. Faults of files (cut short, indexed twice over) never
reach vLLM's classes, and vLLM 0.32 forgives a few that others do not: `static` lists them. A
case that the static check catches is loaded all the same: both must be right.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import releases
from broken import BROKEN
from broken_case import Case
from checkpoint_files import (
    Change,
    Checkpoint,
    config,
    elsewhere,
    ignoring,
    lose,
    pack,
    quantization,
    rename,
    reshape,
    retype,
    tensor,
    write,
)
from commands import GLM
from foreign_form import LINEAR_ONLY, in_hf_quant_config, modelopt
from good import ours, outputs_of, qwen_fp8, released
from good_checkpoints import GOOD
from keepmtp.checkpoints.source import open_source
from keepmtp.quantize.plan.choices import choices_of, found_plan
from keepmtp.recipes.conventions import ALGORITHMS, FORMATS, Format
from keepmtp.recipes.errors import RecipeError
from keepmtp.recipes.find import find_recipe
from keepmtp.recipes.schema import Recipe
from keepmtp.recipes.schemes import SCHEMES
from keepmtp.validate.check.check import Checked, examine
from keepmtp.validate.dryload.check_on import with_loads
from keepmtp.validate.dryload.loader import DryLoader, Job
from keepmtp.validate.facts.dry_load import LoadAccount

By = Literal["static", "dry", "both"]
# Releases that differ from another one in sizes alone.
TWINS = ("dsv4-pro", "deepseek-v3.1", "glm-4.5-air")
# Drafts with a checkpoint of their own: they need a target beside them.
SEPARATE = ("gemma-4-26b-assistant",)
# vLLM builds its attention otherwise than modelopt's config says: plain under NVFP4
# (models/qwen4_exp).
NOT_MODELOPT = ("qwen3.8-flash-next",)
# Of what the static check catches: what vLLM's classes never see, or forgive in 0.32.
STATIC = (
    "E10 copies missing",
    "Fp2 block scales in BF16",
    "Fp4 scale_fmt lost",
    "M8 index names a missing tensor",
    "R5 two configs, two algorithms",
    "R6 shard cut short",
    "R8 a dialect that is not judged",
    "R8 a family without a table",
)


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
        scheme = schemes[number % len(schemes)]
        algorithm = algorithms[number % 3]
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
        "format": format, "backbone": "auto", "mtp": "auto", "budget": "1GB",
        "backbone_auto": {"candidates": ["NVFP4", "FP8_BLOCK", "bf16"]},
    }  # fmt: skip
    choices = choices_of(Recipe.model_validate(recipe), open_source(GLM))
    turns = {}
    for turn, unit in enumerate(choices.units):
        turns[unit.name] = unit.options[turn % len(unit.options)].word
    plan = found_plan(choices.base, choices, turns)
    schemes = set()
    for planned in plan.tensors:
        if (planned.part, planned.role) == ("backbone", "attention"):
            schemes.add(planned.scheme)
    assert len(schemes) == 3
    return outputs_of(plan)


def _two_files(model: str) -> Checkpoint:
    return in_hf_quant_config(modelopt(model, mtp="NVFP4"))


def broken_cases() -> Iterator[DryCase]:
    """All of broken.py, then the table below."""
    for case in BROKEN:
        yield DryCase(
            name=case.name, build=case.build, where=(case.where,),
            by="static" if case.name in STATIC else "both",
        )  # fmt: skip
    yield from DRY


def judged(
    cases: Sequence[DryCase], loader: DryLoader, version: str, place: Path
) -> Iterator[tuple[DryCase, Checked, LoadAccount]]:
    """What the static check and one dry load say of each; `place` is an empty folder."""
    examined = []
    jobs = []
    for number, case in enumerate(cases):
        folder = write(place / f"{number:03}", case.build())
        examined.append(examine(str(folder), vllm=version))
        method = examined[-1].method
        jobs.append(Job(folder=folder, tp=case.tp, num_drafts=case.num_drafts, method=method))
    for case, checked, account in zip(cases, examined, loader.load_all(jobs), strict=True):
        yield case, with_loads(checked, [account]), account


def _is_planned(build: Callable[[], Checkpoint]) -> bool:
    try:
        build()
    except RecipeError:
        return False
    return True


def dry(
    name: str,
    of: str | Callable[[], Checkpoint],
    *changes: Change,
    where: str | tuple[str, ...],
    **place: int,
) -> DryCase:
    """A row of the tables below."""
    words = (where,) if isinstance(where, str) else where
    return DryCase(
        name=name, build=Case(name, of, changes, ()).build, by="dry", where=words, **place
    )


def _claimed_tower() -> Checkpoint:
    checkpoint = qwen_fp8()
    checkpoint.quantization["modules_to_not_convert"].remove("model.visual.blocks.0.attn.proj")
    return checkpoint


DRY_ALONE = (
    dry("E6 head_dim lost", "glm fp8", config("head_dim", None), where="head_dim"),
    dry(
        "R2 other layers attend",
        "next fp8",
        config("full_attention_interval", 2),
        where="model.layers.",
    ),
    dry(
        "E6 compress_ratios of other layers",
        "dsv4 bf16",
        config("compress_ratios", [0, 128, 4, 0]),
        where="layers.",
    ),
    dry(
        "E6 expert_dtype of another release",
        "released dsv4-flash",
        config("expert_dtype", "fp8"),
        where="experts",
    ),
    dry(
        "E8 embedding lost", "next fp8", lose(r"model\.embed_tokens\.weight"), where="embed_tokens"
    ),
    dry("E8 final norm lost", "glm fp8", lose(r"model\.norm\.weight"), where="model.norm"),
    dry(
        "M3 norm in FP8",
        "glm fp8",
        retype(r"model\.layers\.3\.enorm\.weight", "F8_E4M3"),
        where="model.layers.3.enorm",
    ),
    dry(
        "R5 MIXED_PRECISION without layers",
        "glm mixed",
        quantization("quantized_layers", {}),
        where="quantized_layers",
    ),
    dry("R15 experts narrower than a block at TP 4", "v3 block", where="mlp.", tp=4),
    dry("R15 groups cut by TP 4", "glm w4a16", where="mlp.", tp=4),
    dry("R15 more ranks than heads", "glm fp8", where=("num_attention_heads", "heads"), tp=8),
    dry("R15 V4's groups cut by TP 4", "dsv4 block", where="layers.", tp=4),
    dry(
        "F4 head of the target in a file without index",
        "next fp8",
        elsewhere(r"lm_head\..*"),
        where="lm_head",
    ),
    dry(
        "E8 one row lost",
        "glm fp8",
        reshape(r"model\.layers\.3\.eh_proj\.weight", "n k -> 255 k"),
        where="model.layers.3.eh_proj",
    ),
    dry(
        "E8 eh_proj transposed",
        "v3 nvfp4",
        reshape(r"model\.layers\.3\.eh_proj\.weight", "n k -> k n"),
        where="model.layers.3.eh_proj",
    ),
    dry(
        "E8 norm of two",
        "next nvfp4",
        reshape(r"mtp\.pre_fc_norm_hidden\.weight", "n -> 2 n"),
        where="mtp.pre_fc_norm_hidden",
    ),
    dry(
        "E8 stack transposed",
        "released qwen3.5-397b",
        reshape(r".*\.layers\.1\.mlp\.experts\.down_proj", "e n k -> e k n"),
        where="model.language_model.layers.1.mlp.experts.down_proj",
    ),
    dry(
        "E8 gate without up",
        "released qwen3.5-397b",
        reshape(r".*\.layers\.1\.mlp\.experts\.gate_up_proj", "e n k -> e 128 k"),
        where="model.language_model.layers.1.mlp.experts.gate_up_proj",
    ),
    dry(
        "F41 three drafts from two layers",
        partial(released, "glm-4.7", num_nextn_predict_layers=2),
        where=("n_predict", "num_nextn_predict_layers"),
        num_drafts=3,
    ),
)
# What the static check catches too.
BOTH = (
    dry("R2 head count halved", "glm fp8", config("num_attention_heads", 2), where="self_attn"),
    dry("R2 key heads doubled", "glm fp8", config("num_key_value_heads", 4), where="self_attn"),
    dry("R2 expert width doubled", "glm nvfp4", config("moe_intermediate_size", 256), where="mlp."),
    dry(
        "R2 expert width halved",
        "next nvfp4",
        config("moe_intermediate_size", 64),
        where="mlp.experts",
    ),
    dry(
        "R2 hidden size of another model",
        "glm fp8",
        config("hidden_size", 512),
        where=("model.", "lm_head"),
    ),
    dry(
        "R2 vocabulary of another model",
        "glm fp8",
        config("vocab_size", 500),
        where=("embed_tokens", "lm_head"),
    ),
    dry(
        "R2 q_lora_rank of another model", "v3 nvfp4", config("q_lora_rank", 128), where="self_attn"
    ),
    dry(
        "R2 kv_lora_rank of another model",
        "v3 nvfp4",
        config("kv_lora_rank", 256),
        where="self_attn",
    ),
    dry(
        "R2 first dense layer counted twice",
        "glm fp8",
        config("first_k_dense_replace", 2),
        where="model.layers.1.",
    ),
    dry(
        "R2 biases without attention_bias", "glm fp8", config("attention_bias", False), where="bias"
    ),
    dry("R2 norms without use_qk_norm", "glm fp8", config("use_qk_norm", False), where="norm"),
    dry(
        "R2 architecture vLLM does not know",
        "glm fp8",
        config("architectures", ["Glm9ForCausalLM"]),
        where=("architectures", "config.json"),
    ),
    dry(
        "R2 one expert too few in config.json",
        "glm fp8",
        config("n_routed_experts", 3),
        where="mlp.",
    ),
    dry(
        "R2 one expert too many in config.json", "next fp8", config("num_experts", 5), where="mlp."
    ),
    dry(
        "R2 one decoder layer too many",
        "next fp8",
        config("num_hidden_layers", 5),
        where="model.layers.4.",
    ),
    dry(
        "M1 scale of one expert of the draft lost",
        "next fp8",
        lose(r"mtp\.layers\.0\.mlp\.experts\.1\.down_proj\.weight_scale"),
        where="mtp.layers.0.mlp.experts.1",
    ),
    dry(
        "M1 global scale of one expert lost",
        "glm nvfp4",
        lose(r"model\.layers\.2\.mlp\.experts\.2\.up_proj\.weight_global_scale"),
        where="model.layers.2.mlp.experts.2",
    ),
    dry(
        "M1 scale of v_proj in the draft lost",
        "glm w4a16",
        lose(r"model\.layers\.3\.self_attn\.v_proj\.weight_scale"),
        where="model.layers.3.self_attn.v_proj",
    ),
    dry(
        "M1 scale of up_proj lost",
        "next fp8",
        lose(r"model\.layers\.0\.mlp\.shared_expert\.up_proj\.weight_scale"),
        where="model.layers.0.mlp.shared_expert.up_proj",
    ),
    dry(
        "Fp7 input scale of one expert lost",
        "glm modelopt",
        lose(r"model\.layers\.2\.mlp\.experts\.1\.gate_proj\.input_scale"),
        where="model.layers.2.mlp.experts.1",
    ),
    dry(
        "Fp7 second scale of a linear lost",
        "v3 modelopt",
        lose(r"model\.layers\.1\.self_attn\.o_proj\.weight_scale_2"),
        where="model.layers.1.self_attn.o_proj",
    ),
    dry(
        "M3 head stored as bytes",
        "glm fp8",
        retype(r"lm_head\.weight", "U8"),
        where="lm_head.weight",
    ),
    dry(
        "M3 plain weight of the draft as bytes",
        "v3 nvfp4",
        retype(r"model\.layers\.3\.eh_proj\.weight", "U8"),
        where="model.layers.3.eh_proj.weight",
    ),
    dry(
        "M3 FP8 without a scale",
        "glm-5 nvfp4",
        retype(r"model\.layers\.3\.mlp\.shared_experts\..*weight", "F8_E4M3"),
        where="model.layers.3.mlp.shared_experts",
    ),
    dry(
        "M3 integers stored as floats",
        "qwen text int8",
        retype(r"model\.layers\.0\.mlp\.down_proj\.weight", "F8_E4M3"),
        where="model.layers.0.mlp.down_proj",
    ),
    dry(
        "M9 draft one layer on",
        "glm fp8",
        rename(r"model\.layers\.3\.(.*)", r"model.layers.4.\1"),
        where=("model.layers.3.", "model.layers.4."),
    ),
    dry(
        "M9 draft one layer on, Qwen",
        "next fp8",
        rename(r"mtp\.layers\.0\.(.*)", r"mtp.layers.1.\1"),
        where=("mtp.layers.0.", "mtp.layers.1."),
    ),
    dry(
        "M9 draft counted from 1, V4",
        "dsv4 bf16",
        rename(r"mtp\.0\.(.*)", r"mtp.1.\1"),
        where=("mtp.0.", "mtp.1."),
    ),
    dry(
        "M4 native FP8, regexes where names are wanted",
        "v3 native bf16 mtp",
        quantization("ignored_layers", [r"re:^model\.layers\.3\."]),
        where="model.layers.3.",
    ),
    dry(
        "M4 native FP8 without blocks",
        "released deepseek-r1",
        quantization("weight_block_size", None),
        where="weight_scale_inv",
    ),
    dry(
        "F28 glob of layer 1 leaves 10 and 11 plain",
        "glm modelopt",
        ignoring("*layers.1*"),
        where="model.layers.1",
    ),
    dry(
        "F35 shared expert of the draft packed although ignored",
        "v3 nvfp4",
        pack(r"model\.layers\.3\.mlp\.shared_experts\.down_proj", "NVFP4"),
        where="model.layers.3.mlp.shared_experts.down_proj",
    ),
    dry(
        "R2 groups of 64, said to be of 128",
        "glm w4a16",
        quantization("config_groups/*/weights/group_size", 64),
        where="model.layers.0.",
    ),
    dry(
        "R2 asymmetric by config, symmetric on disk",
        "glm w4a16",
        quantization("config_groups/*/weights/symmetric", False),
        where=("weight_zero_point", "model.layers.0."),
    ),
    dry(
        "R2 NVFP4 said to be MXFP4",
        "glm nvfp4",
        quantization("config_groups/*/weights/group_size", 32),
        quantization("config_groups/*/weights/strategy", "group"),
        where="model.layers.",
    ),
    dry(
        "F4 inline MTP in a file without index",
        "glm nvfp4",
        elsewhere(r"model\.layers\.3\..*"),
        where="model.layers.3.",
    ),
    dry(
        "R3 up_proj left plain beside gate_proj",
        "glm nvfp4",
        lose(r"model\.layers\.3\.mlp\.shared_experts\.up_proj\..*"),
        tensor("model.layers.3.mlp.shared_experts.up_proj.weight", "BF16", 128, 256),
        where="model.layers.3.mlp.shared_experts.up_proj",
    ),
    dry(
        "M2 scale of an expert too narrow",
        "v3 modelopt",
        reshape(r"model\.layers\.1\.mlp\.experts\.2\.down_proj\.weight_scale", "n k -> n 4"),
        where="model.layers.1.mlp.experts.2.down_proj",
    ),
    dry(
        "M2 an expert too short",
        "glm fp8",
        reshape(r"model\.layers\.1\.mlp\.experts\.0\.up_proj\.weight", "n k -> 64 k"),
        where="model.layers.1.mlp.experts.",
    ),
    dry(
        "M2 a plain expert of the draft too short",
        "glm-5 nvfp4",
        reshape(r"model\.layers\.3\.mlp\.experts\.1\.gate_proj\.weight", "n k -> 64 k"),
        where="model.layers.3.mlp.experts.1",
    ),
    dry(
        "E2 stack of fewer experts",
        "released qwen3.5-397b",
        reshape(r".*\.layers\.1\.mlp\.experts\.gate_up_proj", "e n k -> 3 n k"),
        where="model.language_model.layers.1.mlp.experts",
    ),
    dry(
        "F35 wildcard leaves a quantized draft plain",
        partial(modelopt, "qwen3-next-80b", mtp="NVFP4"),
        ignoring("mtp*"),
        where="mtp.",
    ),
    dry(
        "F25 shards of one module in two algorithms",
        "glm mixed",
        quantization("quantized_layers/model.layers.1.self_attn.k_proj", {"quant_algo": "NVFP4"}),
        quantization("quantized_layers/model.layers.1.self_attn.q_proj", {"quant_algo": "FP8"}),
        quantization("quantized_layers/model.layers.1.self_attn.qkv_proj", {"quant_algo": "NVFP4"}),
        where="model.layers.1.self_attn",
    ),
    dry(
        "G6 V4's draft ignored by its name on disk",
        partial(ours, "dsv4-flash", "FP8_BLOCK"),
        quantization("config_groups/*/targets", ["Linear"]),
        ignoring(r"re:^mtp\.0\.", without=r"layers\\\.\(?:?3"),
        where="mtp.0.",
    ),
    dry("F34 vision tower not ignored", _claimed_tower, where="visual.blocks.0.attn.proj"),
)
DRY = (*DRY_ALONE, *(replace(case, by="both") for case in BOTH))
