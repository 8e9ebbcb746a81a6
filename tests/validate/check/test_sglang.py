"""`check --runtime sglang` against SGLang's own classes, and a twin for each of its rules."""

import json
from collections.abc import Iterator
from pathlib import Path

import foreign_form
import pytest
import releases
import sglang_classes
import sglang_table
from checkpoint_files import Checkpoint, as_source, write
from commands import keepmtp
from good import ours, released
from keepmtp.recipes.errors import KeepMTPError
from keepmtp.recipes.families import find_view
from keepmtp.validate.check.check import check, check_source
from keepmtp.validate.check.runtime_view import Module, RuntimeView
from keepmtp.validate.check.sglang.view import SglangView
from keepmtp.validate.facts.findings import Finding
from real_release import NAMES, real_release

NOWHERE = Path("/nonexistent")
# Twins of other releases, and a draft with a checkpoint of its own, whose target gives its config a
# part.
LEFT_OUT = ("dsv4-pro", "deepseek-v3.1", "glm-4.5-air", "gemma-4-26b-assistant")
# Scheme, MTP block's scheme, dialect.
FORMS = (
    ("NVFP4", "bf16", "compressed-tensors"),
    ("W4A16", "FP8_BLOCK", "compressed-tensors"),
    ("NVFP4", "NVFP4", "modelopt"),
)
# Classes that the stand-ins do not carry, by model and part.
NOT_CONSTRUCTED = {
    ("dsv4-flash", "backbone"),
    ("glm-5.3-flash", "backbone"),
    ("inkling", "backbone"),
    ("qwen3.5-27b", "backbone"),
    ("kimi-k3-mtp", "backbone"),
    ("kimi-k3-mtp", "mtp"),
    ("longcat-flash-chat", "backbone"),
    ("mimo-v2.5", "backbone"),
    ("minimax-m3", "backbone"),
    ("minimax-m3", "mtp"),
    ("step-3.5-flash", "mtp"),
    ("step-3.7-flash", "backbone"),
    ("step-3.7-flash", "mtp"),
}
# Layers of state-space models are among SGLang's kernels.
UNSEEN = ("mixer.in_proj", "mixer.out_proj")


def view_of(checkpoint: Checkpoint) -> SglangView:
    source = as_source(checkpoint, NOWHERE)
    return SglangView(RuntimeView(source=source, view=find_view(checkpoint.config, "model")))


def findings(checkpoint: Checkpoint) -> tuple[Finding, ...]:
    return check_source(as_source(checkpoint, NOWHERE), runtimes=("sglang",)).findings


def word(module: Module) -> str:
    if module.resolution.error:
        return "raises"
    form = module.resolution.built.form
    return {"nvfp4_modelopt": "nvfp4"}.get(form, "fp8" if form.startswith("fp8") else form)


def written() -> Iterator[tuple[str, Checkpoint]]:
    """What keepmtp writes for every family in every dialect; combinations that it refuses are left
    out.
    """
    for model in releases.MODELS:
        for scheme, mtp, dialect in FORMS if model not in LEFT_OUT else ():
            try:
                yield model, ours(model, scheme, mtp, format=dialect)
            except KeepMTPError:
                continue
        if "quantization_config" in releases.MODELS[model] and model not in LEFT_OUT:
            yield model, released(model)


@pytest.mark.full
def test_each_module_is_built_as_by_sglangs_own_classes():
    checkpoints = list(written())
    parts = ("backbone", "mtp")
    asked = [
        sglang_classes.Question(each.config, part) for _, each in checkpoints for part in parts
    ]
    answers = iter(sglang_classes.ask(asked))
    agreed, differing, families, unconstructed = 0, [], set(), set()
    for model, checkpoint in checkpoints:
        view = view_of(checkpoint)
        for part in parts:
            theirs = next(answers)
            mine = {
                each.name: each
                for each in view.modules
                if each.part == part and each.loads_quantized
            }
            if not theirs.modules:
                unconstructed.add((model, part)) if theirs.name == "" and theirs.error else None
                continue
            families.add(view.runtime.view.family.model_type)
            for name, module in mine.items():
                if name.endswith(UNSEEN) or word(module) == "unknown":
                    continue
                built = theirs.modules.get(name)
                if built is None or built.word != word(module):
                    differing.append((model, part, name, word(module), built))
                agreed += 1
    assert not differing, (len(differing), differing[:12])
    assert unconstructed <= NOT_CONSTRUCTED, unconstructed - NOT_CONSTRUCTED
    print(agreed, len(families), len(unconstructed))
    assert agreed > 1500 and len(families) >= 24


def named(found: tuple[Finding, ...], rule: str) -> Finding:
    return next(finding for finding in found if finding.rule == rule)


def quantization(checkpoint: Checkpoint) -> dict:
    return checkpoint.config["quantization_config"]


def of_one_group(checkpoint: Checkpoint, **changes: object) -> Checkpoint:
    for group in quantization(checkpoint)["config_groups"].values():
        group.update(changes)
    return checkpoint


def test_a_release_that_sglang_serves_has_no_findings():
    for model in ("deepseek-r1", "glm-4.7", "qwen3.5-27b", "deepseek-v3.2"):
        assert findings(released(model)) == (), model


def test_names_of_the_draft_that_no_target_matches():
    checkpoint = ours("glm-4.7", "NVFP4", "FP8_DYNAMIC")
    quantization(checkpoint)["ignore"] = ["lm_head", "re:.*mlp[.]gate$", "re:.*eh_proj$"]
    for group in quantization(checkpoint)["config_groups"].values():
        group["targets"] = [target for target in group["targets"] if "decoder" not in target]
    found = named(findings(checkpoint), "sglang-unresolved")
    assert found.where.startswith("model.decoder.") and found.runtime == "sglang"
    assert "Unable to find matching target for model.decoder." in found.says
    assert "re:^model\\.decoder\\." in found.cure


def test_a_quantized_draft_under_modelopt_fp4_is_built_plain():
    found = named(findings(ours("glm-4.7", "NVFP4", "NVFP4", format="modelopt")), "sglang-form")
    assert "builds model.decoder." in found.says and "plain under modelopt_fp4" in found.says
    assert "glm4_moe_nextn.py" in found.says and found.where.startswith("model.layers.3.")


def test_layer_61_alone_is_renamed():
    checkpoint = ours("deepseek-r1", "FP8_DYNAMIC", "bf16")
    quantization(checkpoint)["ignore"] = ["lm_head", "re:.*mlp[.]gate$", "model.layers.3"]
    plain = [name for name in checkpoint.tensors if name.startswith("model.layers.3.")]
    quantization(checkpoint)["ignore"] += sorted({name.rpartition(".")[0] for name in plain})
    of_one_group(checkpoint, targets=["Linear"])
    found = named(findings(checkpoint), "sglang-form")
    assert "builds model.decoder." in found.says and "plain BF16" in found.says


def test_blocks_without_the_target_linear():
    checkpoint = ours("deepseek-r1", "FP8_BLOCK", "bf16")
    found = named(findings(checkpoint), "sglang-block-size")
    assert (
        found.where.endswith("self_attn.kv_b_proj.weight")
        and "_resolve_layer_weight_block_size" in found.says
    )


@pytest.mark.parametrize("dialect", ["compressed-tensors", "modelopt"])
def test_a_packed_weight_that_sglang_absorbs(dialect):
    checkpoint = ours("deepseek-r1", "NVFP4A16", "bf16", format=dialect)
    found = named(findings(checkpoint), "sglang-absorbed")
    assert found.where.startswith("model.layers.0.self_attn.kv_b_proj.weight") and found.count == 3


def test_integers_of_experts_in_a_mixed_config():
    checkpoint = ours("glm-4.7", "W4A16", "FP8_DYNAMIC")
    found = [each for each in findings(checkpoint) if "pack-quantized" in each.says]
    assert [each.where for each in found] == ["model.layers.1.mlp.experts"]
    assert quantization(checkpoint)["format"] == "mixed-precision" and found[0].count == 2


def test_families_without_a_draft_class():
    for model in ("exaone-4.5-33b", "openpangu-ultra", "kimi-k3-mtp", "minimax-m3"):
        found = named(findings(released(model)), "sglang-draft")
        assert "has no draft for" in found.says and found.severity == "error"


def test_mixed_precision_without_nvfp4_is_read_as_w4afp8():
    checkpoint = ours("glm-4.7", "NVFP4", "bf16", format="modelopt")
    quantization(checkpoint).update(
        quant_algo="MIXED_PRECISION",
        quantized_layers={"model.layers.0.self_attn.o_proj": {"quant_algo": "FP8"}},
    )
    assert "W4AFP8" in named(findings(checkpoint), "sglang-config").says


def test_a_group_without_weights():
    checkpoint = ours("glm-4.7", "NVFP4", "bf16")
    quantization(checkpoint)["config_groups"]["group_9"] = {
        "targets": ["LlamaAttention"],
        "weights": None,
    }
    (found,) = findings(checkpoint)
    assert found.rule == "sglang-config" and "config_groups.group_9.weights" in found.says


def test_two_mtp_layers_are_one_too_many():
    checkpoint = released("glm-4.7")
    checkpoint.config["num_nextn_predict_layers"] = 2
    assert "Only 1 nextn layer" in named(findings(checkpoint), "sglang-layers").says


def test_a_block_that_is_not_there():
    checkpoint = released("glm-4.7")
    checkpoint.tensors = {
        name: spec for name, spec in checkpoint.tensors.items() if ".layers.3." not in name
    }
    found = named(findings(checkpoint), "sglang-mtp-missing")
    assert found.where == "model.layers.3.*" and "drafts from what was in memory" in found.says


def test_a_cache_scheme_that_sglang_ignores():
    checkpoint = ours("glm-4.7", "FP8_DYNAMIC", "bf16")
    quantization(checkpoint)["kv_cache_scheme"] = {
        "type": "float",
        "num_bits": 8,
        "strategy": "channel",
    }
    assert named(findings(checkpoint), "sglang-kv-cache").severity == "warning"


def test_a_draft_that_neither_list_names():
    """sglang #38574, #40002: `Linear` reaches the draft, for which the scheme of the experts has no
    linear class.
    """
    checkpoint = ours("qwen3.5-397b", "W4A16", "bf16")
    inputs = {
        "num_bits": 8,
        "type": "float",
        "strategy": "token",
        "dynamic": True,
        "symmetric": True,
    }
    of_one_group(checkpoint, targets=["Linear"], input_activations=inputs)
    quantization(checkpoint)["ignore"] = ["lm_head"]
    found = [each for each in findings(checkpoint) if each.where.startswith("mtp.")]
    assert found and all("it has no class for" in each.says for each in found)


def test_halves_of_a_fused_module_in_ignore():
    """sglang #35797: entries for single projections reach the fused ones of Qwen3.5, if all are
    there.
    """
    checkpoint = ours("qwen3.5-27b", "NVFP4", "bf16")
    of_one_group(checkpoint, targets=["Linear"])
    plain = {
        each.name
        for each in view_of(checkpoint).modules
        if each.part == "backbone" and each.loads_quantized
    }
    backbone = [
        name for name in plain if "linear_attn.in_proj_ba" in name or name.endswith("lm_head")
    ]
    halves = [f"mtp.layers.0.self_attn.{name}_proj" for name in "qkvo"]
    halves += [f"mtp.layers.0.mlp.{name}_proj" for name in ("gate", "up", "down")]
    quantization(checkpoint)["ignore"] = [*backbone, "re:.*in_proj_[ab]$", *halves]
    assert not [each for each in findings(checkpoint) if "mtp." in each.where]
    quantization(checkpoint)["ignore"].remove("mtp.layers.0.self_attn.k_proj")
    found = [each for each in findings(checkpoint) if "mtp." in each.where]
    assert [each.where for each in found] == [
        "mtp.layers.0.self_attn.qkv_proj"
    ] and "different" in found[0].says


def test_a_mixed_quark_block_of_which_one_entry_names_experts():
    """sglang #38870, #39064, #40597: such an entry makes the whole block plain, whatever its other
    tensors are.
    """
    checkpoint = foreign_form.quark(
        "qwen3.5-397b", "FP8_DYNAMIC", exclude=["re:.*gate$", "mtp.layers.0.mlp.experts.0"]
    )
    found = [
        each for each in findings(checkpoint) if each.where.startswith("mtp.layers.0.self_attn.")
    ]
    assert found and "exclude names it" in found[0].says and "qwen3_5_mtp.py" in found[0].says


def test_a_plain_quark_block_that_no_entry_names():
    """sglang #36158: size mismatch, or values cast to 8 bits."""
    found = [
        each
        for each in findings(foreign_form.quark("deepseek-r1", exclude=["re:.*gate$"]))
        if "decoder" in each.says
    ]
    assert found and all(each.rule == "sglang-form" and "plain BF16" in each.says for each in found)


@pytest.mark.parametrize("name", [name for name in NAMES if "minimax" not in name])
def test_public_releases(name, tmp_path):
    """What public releases say to SGLang, which serves them; GPTQ's names are not judged."""
    found = check(write(tmp_path / "checkpoint", real_release(name)), runtimes=("sglang",)).findings
    wanted = [("warning", "sglang-config")] if "gptq" in name else []
    assert [(each.severity, each.rule) for each in found] == wanted, found


def test_both_servers_are_asked_at_once():
    checkpoint = ours("glm-4.7", "NVFP4", "NVFP4", format="modelopt")
    both = check_source(as_source(checkpoint, NOWHERE), runtimes=("vllm", "sglang")).findings
    assert {finding.runtime for finding in both} == {"sglang"}, "vLLM serves it"
    with pytest.raises(StopIteration):
        named(check_source(as_source(checkpoint, NOWHERE)).findings, "sglang-form")


@pytest.mark.full
def test_the_command_names_the_server(tmp_path):
    folder = write(tmp_path / "checkpoint", ours("glm-4.7", "NVFP4", "NVFP4", format="modelopt"))
    done = keepmtp("check", str(folder), "--runtime", "sglang", "--json")
    (line,) = done.stdout.splitlines()
    printed = json.loads(line)
    assert done.returncode == 1 and not printed["ok"]
    assert {finding["runtime"] for finding in printed["findings"]} == {"sglang"}
    assert printed["runtimes"] == ["sglang"]
    both = keepmtp("check", str(folder), "--runtime", "vllm", "--runtime", "sglang")
    assert both.stdout.rstrip().endswith("; judged for vLLM 0.32, SGLang 0.5.23 (not run)")
    alone = keepmtp("check", str(folder))
    assert alone.returncode == 0 and "judged for" not in alone.stdout, "vLLM takes it"
    unknown = keepmtp("check", str(folder), "--runtime", "tgi")
    assert unknown.returncode == 2 and "--runtime: must be one of vllm, sglang" in unknown.stderr


# Of a backbone with linear attention that SGLang fuses otherwise, the check says nothing.
NOT_JUDGED = {"ling-3.0-flash"}


@pytest.mark.full
def test_the_check_finds_what_the_plan_says():
    """Where the plan says that SGLang serves an output, the check finds no error in it, and the
    other way round.
    """
    differing, compared = [], 0
    for format, pairs in sglang_table.PAIRS.items():
        for model in releases.MODELS:
            for pair in pairs[:3:2] if model not in {*LEFT_OUT, *NOT_JUDGED} else ():
                if (why := sglang_table.obstacle(model, *pair, format)) == sglang_table.REFUSED:
                    continue
                found = findings(ours(model, *pair, format=format))
                errors = [each for each in found if each.severity == "error"]
                compared += 1
                if bool(why) != bool(errors):
                    differing.append((model, format, *pair, why, errors[:1]))
    assert not differing and compared > 110, (compared, differing)
