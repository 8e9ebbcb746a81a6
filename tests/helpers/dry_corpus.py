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
from typing import Any, Literal

import releases
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
from good import ours, qwen_fp8, released
from keepmtp.recipes.errors import RecipeError
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
    separate = [f"released {model}" for model in SEPARATE]
    yield from (
        DryCase(name=name, build=build) for name, build in GOOD.items() if name not in separate
    )
    schemes = [scheme for scheme in SCHEMES if scheme != "NVFP4"]
    for number, model in enumerate(
        model for model in releases.MODELS if model not in (*TWINS, *SEPARATE)
    ):
        scheme = schemes[number % len(schemes)]
        algorithm = [each for each in ALGORITHMS if each not in LINEAR_ONLY][number % 3]
        forms: dict[str, Callable[[], Checkpoint]] = {
            "ct, MTP plain": lambda model=model: ours(model, "NVFP4"),
            "ct, MTP quantized": lambda model=model: ours(model, "NVFP4", "NVFP4"),
            f"ct {scheme}": lambda model=model, scheme=scheme: ours(model, scheme, scheme),
            "modelopt, MTP plain": lambda model=model: ours(model, "NVFP4", format="modelopt"),
            "modelopt, MTP quantized": lambda model=model: in_hf_quant_config(
                modelopt(model, mtp="NVFP4")
            ),
            f"modelopt {algorithm}": lambda model=model, word=algorithm: ours(
                model, word, word, format="modelopt"
            ),
            "modelopt, two algorithms": lambda model=model: ours(
                model, "FP8_BLOCK", "NVFP4", format="modelopt"
            ),
        }
        for form, build in forms.items():
            if not (form == "modelopt, MTP quantized" and model in NOT_MODELOPT) and _is_planned(
                build
            ):
                yield DryCase(name=f"{model} {form}", build=build)
    for model in ("qwen3.5-text", "mimo-7b"):
        for scheme in LINEAR_ONLY:
            yield DryCase(
                name=f"{model} modelopt {scheme}",
                build=lambda model=model, scheme=scheme: ours(
                    model, scheme, scheme, format="modelopt"
                ),
            )


def broken_cases() -> Iterator[DryCase]:
    """All of broken.py, then the table below."""
    for case in BROKEN:
        yield DryCase(
            name=case.name, build=case.build, where=(case.where,),
            by="static" if case.name in STATIC_ONLY else "both",
        )  # fmt: skip
    yield from DRY


def _broken(build: Callable[[], Checkpoint], change: Change) -> Callable[[], Checkpoint]:
    def broken() -> Checkpoint:
        checkpoint = build()
        change(checkpoint)
        return checkpoint

    return broken


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
    build = GOOD[base] if isinstance(base, str) else base
    return DryCase(name=name, build=_broken(build, change), by=by, where=where, tp=tp, num_drafts=k)


def _nothing(checkpoint: Checkpoint) -> None:
    """Good as it is, but not for this GPU count or number of drafts."""


def _two_layers() -> Checkpoint:
    return released("glm-4.7", num_nextn_predict_layers=2)


def _said(**entries: Any) -> Change:
    return lambda c: c.quantization.update(entries)


DRY: tuple[DryCase, ...] = (
    # Sizes that config.json has wrong: parameters of another size, filled in part or from a part,
    # often in silence.
    _case("R2 head count halved", "glm fp8", setting("num_attention_heads", 2), "self_attn"),
    _case("R2 key heads doubled", "glm fp8", setting("num_key_value_heads", 4), "self_attn"),
    _case("E6 head_dim lost", "glm fp8", setting("head_dim", None), "head_dim"),
    _case("R2 expert width doubled", "glm nvfp4", setting("moe_intermediate_size", 256), "mlp."),
    _case("R2 expert width halved", "next nvfp4", setting("moe_intermediate_size", 64), "mlp.experts"),
    _case("R2 hidden size of another model", "glm fp8", setting("hidden_size", 512), "model.", "lm_head"),
    _case("R2 one expert too few in config.json", "glm fp8", setting("n_routed_experts", 3), "mlp.", by="both"),
    _case("R2 one expert too many in config.json", "next fp8", setting("num_experts", 5), "mlp.", by="both"),
    _case("R2 vocabulary of another model", "glm fp8", setting("vocab_size", 500), "embed_tokens", "lm_head"),
    _case("R2 q_lora_rank of another model", "v3 nvfp4", setting("q_lora_rank", 128), "self_attn"),
    _case("R2 kv_lora_rank of another model", "v3 nvfp4", setting("kv_lora_rank", 256), "self_attn"),
    _case("R2 first dense layer counted twice", "glm fp8", setting("first_k_dense_replace", 2), "model.layers.1."),
    _case("R2 other layers attend", "next fp8", setting("full_attention_interval", 2), "model.layers."),
    _case("R2 biases without attention_bias", "glm fp8", setting("attention_bias", False), "bias"),
    _case("R2 norms without use_qk_norm", "glm fp8", setting("use_qk_norm", False), "norm"),
    _case("R2 one decoder layer too many", "next fp8", setting("num_hidden_layers", 5), "model.layers.4.", by="both"),
    _case("E6 compress_ratios of other layers", "dsv4 bf16", setting("compress_ratios", [0, 128, 4, 0]), "layers."),
    _case("E6 expert_dtype of another release", "released dsv4-flash", setting("expert_dtype", "fp8"), "experts"),
    _case("R2 architecture vLLM does not know", "glm fp8", setting("architectures", ["Glm9ForCausalLM"]),
          "architectures", "config.json"),
    # One tensor of many.
    _case("M1 scale of one expert of the draft lost", "next fp8",
          lose(r"mtp\.layers\.0\.mlp\.experts\.1\.down_proj\.weight_scale"), "mtp.layers.0.mlp.experts.1", by="both"),
    _case("M1 global scale of one expert lost", "glm nvfp4",
          lose(r"model\.layers\.2\.mlp\.experts\.2\.up_proj\.weight_global_scale"), "model.layers.2.mlp.experts.2",
          by="both"),
    _case("M1 scale of v_proj in the draft lost", "glm w4a16",
          lose(r"model\.layers\.3\.self_attn\.v_proj\.weight_scale"), "model.layers.3.self_attn.v_proj", by="both"),
    _case("M1 scale of up_proj lost", "next fp8", lose(r"model\.layers\.0\.mlp\.shared_expert\.up_proj\.weight_scale"),
          "model.layers.0.mlp.shared_expert.up_proj", by="both"),
    _case("Fp7 input scale of one expert lost", "glm modelopt",
          lose(r"model\.layers\.2\.mlp\.experts\.1\.gate_proj\.input_scale"), "model.layers.2.mlp.experts.1",
          by="both"),
    _case("Fp7 second scale of a linear lost", "v3 modelopt",
          lose(r"model\.layers\.1\.self_attn\.o_proj\.weight_scale_2"), "model.layers.1.self_attn.o_proj", by="both"),
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
    # Stacked experts.
    _case("E2 stack of fewer experts", "released qwen3.5-397b",
          retyping(r".*\.layers\.1\.mlp\.experts\.gate_up_proj", shape=lambda e, n, k: (e - 1, n, k)),
          "model.language_model.layers.1.mlp.experts", by="both"),
    _case("E8 stack transposed", "released qwen3.5-397b",
          retyping(r".*\.layers\.1\.mlp\.experts\.down_proj", shape=lambda e, n, k: (e, k, n)),
          "model.language_model.layers.1.mlp.experts.down_proj"),
    _case("E8 gate without up", "released qwen3.5-397b",
          retyping(r".*\.layers\.1\.mlp\.experts\.gate_up_proj", shape=lambda e, n, k: (e, n // 2, k)),
          "model.language_model.layers.1.mlp.experts.gate_up_proj"),
    # dtypes
    _case("M3 head stored as bytes", "glm fp8", retyping(r"lm_head\.weight", "U8"), "lm_head.weight", by="both"),
    _case("M3 plain weight of the draft as bytes", "v3 nvfp4", retyping(r"model\.layers\.3\.eh_proj\.weight", "U8"),
          "model.layers.3.eh_proj.weight", by="both"),
    _case("M3 FP8 without a scale", "glm-5 nvfp4", retyping(r"model\.layers\.3\.mlp\.shared_experts\..*weight",
          "F8_E4M3"), "model.layers.3.mlp.shared_experts", by="both"),
    _case("M3 norm in FP8", "glm fp8", retyping(r"model\.layers\.3\.enorm\.weight", "F8_E4M3"), "model.layers.3.enorm"),
    _case("M3 integers stored as floats", "qwen text int8",
          retyping(r"model\.layers\.0\.mlp\.down_proj\.weight", "F8_E4M3"), "model.layers.0.mlp.down_proj", by="both"),
    # Layers and files.
    _case("M9 draft one layer on", "glm fp8", renaming(r"model\.layers\.3\.(.*)", r"model.layers.4.\1"),
          "model.layers.3.", "model.layers.4.", by="both"),
    _case("M9 draft one layer on, Qwen", "next fp8", renaming(r"mtp\.layers\.0\.(.*)", r"mtp.layers.1.\1"),
          "mtp.layers.0.", "mtp.layers.1.", by="both"),
    _case("M9 draft counted from 1, V4", "dsv4 bf16", renaming(r"mtp\.0\.(.*)", r"mtp.1.\1"), "mtp.0.", "mtp.1.",
          by="both"),
    _case("F4 inline MTP in a file without index", "glm nvfp4",
          lambda c: setattr(c, "elsewhere", c.take(r"model\.layers\.3\..*")), "model.layers.3.", by="both"),
    _case("F4 head of the target in a file without index", "next fp8",
          lambda c: setattr(c, "elsewhere", c.take(r"lm_head\..*")), "lm_head"),
    _case("E8 embedding lost", "next fp8", lose(r"model\.embed_tokens\.weight"), "embed_tokens"),
    _case("E8 final norm lost", "glm fp8", lose(r"model\.norm\.weight"), "model.norm"),
    # What the config says.
    _case("F34 vision tower not ignored", qwen_fp8, lambda c: c.quantization["modules_to_not_convert"].remove(
          "model.visual.blocks.0.attn.proj"), "visual.blocks.0.attn.proj"),
    _case("M4 native FP8, regexes where names are wanted", "v3 native bf16 mtp",
          _said(ignored_layers=[r"re:^model\.layers\.3\."]), "model.layers.3.", by="both"),
    _case("M4 native FP8 without blocks", "released deepseek-r1", _said(weight_block_size=None), "weight_scale_inv",
          by="both"),
    _case("R2 groups of 64, said to be of 128", "glm w4a16", groups(lambda g: g["weights"].update(group_size=64)),
          "model.layers.0.", by="both"),
    _case("R2 asymmetric by config, symmetric on disk", "glm w4a16",
          groups(lambda g: g["weights"].update(symmetric=False)), "weight_zero_point", "model.layers.0.", by="both"),
    _case("R2 NVFP4 said to be MXFP4", "glm nvfp4",
          groups(lambda g: g["weights"].update(strategy="group", group_size=32)), "model.layers.", by="both"),
    _case("F35 wildcard leaves a quantized draft plain", lambda: modelopt("qwen3-next-80b", mtp="NVFP4"),
          lambda c: c.quantization["ignore"].append("mtp*"), "mtp.", by="both"),
    _case("F28 glob of layer 1 leaves 10 and 11 plain", "glm modelopt", ignoring("*layers.1*"), "model.layers.1",
          by="both"),
    _case("R5 MIXED_PRECISION without layers", "glm mixed", _said(quantized_layers={}), "quantized_layers"),
    _case("F25 shards of one module in two algorithms", "glm mixed",
          lambda c: c.quantization["quantized_layers"].update({
              "model.layers.1.self_attn.q_proj": {"quant_algo": "FP8"},
              "model.layers.1.self_attn.k_proj": {"quant_algo": "NVFP4"},
              "model.layers.1.self_attn.qkv_proj": {"quant_algo": "NVFP4"}}),
          "model.layers.1.self_attn", by="both"),
    _case("G6 V4's draft ignored by its name on disk", lambda: ours("dsv4-flash", "FP8_BLOCK"),
          both(groups(lambda g: g.update(targets=["Linear"])), ignoring(r"re:^mtp\.0\.", without=r"layers\\\.\(?:?3")),
          "mtp.0.", by="both"),
    _case("F35 shared expert of the draft packed although ignored", "v3 nvfp4",
          pack(r"model\.layers\.3\.mlp\.shared_experts\.down_proj", "NVFP4"),
          "model.layers.3.mlp.shared_experts.down_proj", by="both"),
    # Good checkpoints, served where they do not fit.
    _case("R15 experts narrower than a block at TP 4", "v3 block", _nothing, "mlp.", tp=4),
    _case("R15 groups cut by TP 4", "glm w4a16", _nothing, "mlp.", tp=4),
    _case("R15 more ranks than heads", "glm fp8", _nothing, "num_attention_heads", "heads", tp=8),
    _case("R15 V4's groups cut by TP 4", "dsv4 block", _nothing, "layers.", tp=4),
    _case("F41 three drafts from two layers", _two_layers, _nothing, "n_predict", "num_nextn_predict_layers", k=3),
)  # fmt: skip
