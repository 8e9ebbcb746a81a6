"""`format: modelopt`: the same packed bytes under other names, scales in the other convention,
configs that agree.

That vLLM builds what was meant is asked twice: here of the check, whose matching is compared with
vLLM's, and of vLLM's own loader by the dry-load corpus (tests/helpers/dry_corpus.py).
"""

import json
from pathlib import Path

import pytest
import releases
import torch
from calibrated import in_both_formats
from checked import check
from checkpoint_files import as_source, ignoring, write
from data_files import cases, json_of
from good import ours, planned
from keepmtp.checkpoints.dequantize import dequantize
from keepmtp.checkpoints.source import open_source
from keepmtp.checkpoints.stored import stored_weights
from keepmtp.checkpoints.values import read_tensor
from keepmtp.cli.main import app
from keepmtp.quantize.plan.plan import Plan
from keepmtp.recipes.errors import RecipeError
from keepmtp.recipes.find import find_recipe
from typer.testing import CliRunner

PAIRS = [("NVFP4", "bf16"), ("NVFP4A16", "NVFP4A16"), ("FP8", "FP8"), ("FP8_BLOCK", "NVFP4A16")]
# Refused in a sentence: vLLM's mapper renames every entry that could name a module of the draft.
NAMELESS = "vLLM renames every entry that could name"


@pytest.mark.few(36, 72)
@pytest.mark.parametrize("words", PAIRS, ids=" ".join)
@pytest.mark.parametrize("model", releases.MODELS)
def test_every_family_passes_the_check(model, words, tmp_path):
    try:
        checkpoint = ours(model, *words, format="modelopt")
    except RecipeError as error:
        if NAMELESS not in str(error):
            with pytest.raises(RecipeError):  # compressed-tensors' format is refused too
                planned(model, *words)
        pytest.skip(str(error))
    second = json.dumps(checkpoint.json_files["hf_quant_config.json"])
    (tmp_path / "hf_quant_config.json").write_text(second)
    report = check(as_source(checkpoint, tmp_path))
    assert (report.findings, report.facts.dialect) == ((), "modelopt")
    # As modelopt's own table has it. vLLM takes 16 where a row says nothing, so no load tells.
    for row in checkpoint.quantization.get("quantized_layers", {}).values():
        assert row.get("group_size") == (16 if "NVFP4" in row["quant_algo"] else None), row


@pytest.fixture(scope="module")
def twins(tmp_path_factory) -> dict[str, tuple[Plan, Path]]:
    """One model by format: NVFP4 with static scales, FP8 a row, FP8 with static scales; the block
    is NVFP4.
    """
    words = {"experts": "NVFP4", "rest": "FP8_DYNAMIC", "shared_experts": "FP8", "mtp": "NVFP4"}
    return in_both_formats(tmp_path_factory.mktemp("twins"), **words)


def stored(folder: Path):
    source = open_source(folder)
    weights, _ = stored_weights(source.entries.values())
    return source, weights


def test_packed_bytes_are_the_same_and_values_are_equal(twins):
    """vLLM multiplies by 1 / weight_global_scale: exactly the weight_scale_2 that is written."""
    (first, one), (second, other) = (stored(folder) for _, folder in twins.values())
    assert one.keys() == other.keys()
    forms, num_other = set(), [0, 0]
    for module, weight in one.items():
        parts = {leaf: read_tensor(first, entry) for leaf, entry in weight.parts.items()}
        theirs = {leaf: read_tensor(second, entry) for leaf, entry in other[module].parts.items()}
        forms.add((weight.form, other[module].form))
        packed, same = (
            next(p[leaf] for leaf in ("weight_packed", "weight") if leaf in p)
            for p in (parts, theirs)
        )
        assert torch.equal(packed.view(torch.uint8), same.view(torch.uint8)), module
        if weight.form == "nvfp4":
            assert theirs["weight_scale_2"].shape == theirs["input_scale"].shape == ()
            assert theirs["weight_scale_2"] == 1.0 / parts["weight_global_scale"], module
            assert theirs["input_scale"] == 1.0 / parts["input_global_scale"], module
        values = [
            dequantize(w.form, p, shape=w.shape, block=w.block)
            for w, p in ((weight, parts), (other[module], theirs))
        ]
        if weight.form != "nvfp4":
            assert torch.equal(*values), module
            continue
        # A scale divided by g and one times 1 / g differ by two roundings in F32: seldom another
        # BF16, never two away.
        num_other[0] += int((values[0] != values[1]).sum())
        num_other[1] += values[0].numel()
        apart = (values[0].view(torch.int16).int() - values[1].view(torch.int16).int()).abs().max()
        assert apart <= 1, module
    same = {(form, form) for form in ("plain", "fp8_channel", "fp8_tensor")}
    assert forms == same | {("nvfp4", "nvfp4_modelopt")}
    assert num_other[0] <= num_other[1] / 1000


def test_the_written_folder_passes_its_check_and_both_configs_agree(twins):
    plan, folder = twins["modelopt"]
    assert check(folder, source=plan.source).findings == ()
    config = json_of(folder / "config.json")["quantization_config"]
    second = json_of(folder / "hf_quant_config.json")
    assert (config["quant_method"], config["quant_algo"]) == ("modelopt", "MIXED_PRECISION")
    layers = config["quantized_layers"]
    assert layers["model.layers.1.mlp.experts"] == {"quant_algo": "NVFP4", "group_size": 16}
    assert layers["model.layers.1.mlp.shared_experts.down_proj"] == {"quant_algo": "FP8"}
    attention = layers["model.layers.0.self_attn.qkv_proj"]
    assert attention == {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}
    assert {"lm_head", "model.layers.3.eh_proj", "model.layers.1.mlp.gate"} <= {*config["ignore"]}
    assert second["producer"]["name"] == "modelopt"
    assert second["quantization"]["quantized_layers"] == layers
    assert second["quantization"]["exclude_modules"] == config["ignore"]


@cases
def test_what_modelopt_cannot_say_is_refused(model, scheme, mtp, named):
    with pytest.raises((RecipeError, ValueError), match="modelopt") as caught:
        ours(model, scheme, mtp, format="modelopt")
    assert named in str(caught.value)


def test_one_glob_covers_the_whole_block(tmp_path):
    """The twin: `mtp.layers.0*` misses mtp.fc (vllm #38832)."""
    checkpoint = ours("qwen3-next-80b", "FP8", format="modelopt")
    ignored = checkpoint.quantization["ignore"]
    assert [entry for entry in ignored if entry.startswith("mtp")] == ["mtp.*"]
    ignoring("mtp.layers.0*", without=r"^mtp")(checkpoint)
    del checkpoint.json_files["hf_quant_config.json"]
    found = check(write(tmp_path / "broken", checkpoint)).findings
    assert any(finding.severity == "error" and "mtp.fc" in finding.where for finding in found)


@cases
def test_a_module_that_no_entry_reaches_is_not_quantized_by_default(model):
    """vLLM 0.32.0 builds their head without a name, or attention plain under NVFP4: each module is
    named instead.
    """
    said = ours(model, "NVFP4", format="modelopt").quantization
    assert said["quant_algo"] == "MIXED_PRECISION"
    assert {row["quant_algo"] for row in said["quantized_layers"].values()} == {"NVFP4"}


def test_the_plan_is_shown_in_its_dialect(tmp_path):
    path = tmp_path / "recipe.yaml"
    text = find_recipe("tiny-glm4-moe", scheme="nvfp4a16-fp8")[1]
    path.write_text(f"{text}format: modelopt\n")
    words = ["plan", str(path), "--source", "models/tiny-glm4-moe"]
    config = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)["quantization_config"]
    assert config["quant_algo"] == "MIXED_PRECISION" and "model.layers.3.*" in config["ignore"]
    rows = config["quantized_layers"]
    assert rows["model.layers.0.self_attn.qkv_proj"]["quant_algo"] == "FP8_PB_WO"
    assert rows["model.layers.1.mlp.experts"]["quant_algo"] == "W4A16_NVFP4"
    shown = CliRunner().invoke(app, words)
    assert "vLLM 0.33, not SGLang 0.5.23: it reads from weight_scale_inv alone" in shown.stdout
