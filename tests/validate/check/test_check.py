"""The static check: silent on good checkpoints, and each broken one caught by its rule, with the
culprit's name.
"""

import json
from functools import partial

import pytest
import releases
from broken_case import case, finds, met
from checked import check
from checkpoint_files import (
    as_source,
    changed,
    config,
    cut,
    indexed,
    lose,
    quantization,
    rename,
    retype,
    tensor,
    write,
)
from foreign_form import LINEAR_ONLY, modelopt
from good import ours, released, with_scales
from good_checkpoints import GOOD
from keepmtp.checkpoints.dialects import choose
from keepmtp.cli.findings import check_json
from keepmtp.recipes.conventions import ALGORITHMS
from keepmtp.recipes.errors import RecipeError
from keepmtp.recipes.families import families
from keepmtp.recipes.family import VLLMName
from keepmtp.recipes.runtimes.vllm import KNOWN, asked, holds
from keepmtp.recipes.schemes import SCHEMES
from keepmtp.validate.check.check import examine
from without_mtp import llama

PROJECTIONS = r"model\.layers\.\d+\.self_attn\..*_proj"
BITSANDBYTES = {"quant_method": "bitsandbytes", "load_in_4bit": True}
MLX = {"group_size": 64, "bits": 4, "mode": "affine"}
INT4 = {"dtype": "int4", "group_size": 128, "symmetric": True}


@pytest.mark.parametrize("name", GOOD)
def test_good_checkpoints_pass_without_a_word(name, tmp_path):
    report = check(write(tmp_path / "checkpoint", GOOD[name]()))
    assert report.findings == ()
    assert report.ok


@pytest.mark.few(280, 560)
@pytest.mark.parametrize("mtp", ["bf16", "source", "as backbone"])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("model", releases.MODELS)
def test_whatever_keepmtp_writes_passes_without_a_word(model, scheme, mtp, tmp_path):
    policy = scheme if mtp == "as backbone" else mtp
    try:
        checkpoint = ours(model, scheme, policy)
    except RecipeError as error:
        pytest.skip(str(error))
    report = check(as_source(checkpoint, tmp_path), source=as_source(released(model), tmp_path))
    assert report.findings == ()


@pytest.mark.few(54, 108)
@pytest.mark.parametrize("mtp", ["bf16", "as backbone"])
@pytest.mark.parametrize("scheme", [scheme for scheme in ALGORITHMS if scheme not in LINEAR_ONLY])
@pytest.mark.parametrize("model", releases.MODELS)
def test_the_same_told_as_modelopt_tells_it_passes(model, scheme, mtp, tmp_path):
    try:
        checkpoint = modelopt(model, scheme, scheme if mtp == "as backbone" else mtp)
    except RecipeError as error:
        pytest.skip(str(error))
    assert check(as_source(checkpoint, tmp_path)).findings == ()


test_examined = finds(
    "method",
    case(
        "bitsandbytes",
        "released glm-4.7",
        config("quantization_config", BITSANDBYTES),
        retype(rf"{PROJECTIONS}\.weight", "U8"),
        where="quantization_config.quant_method",
        says="is bitsandbytes, which vLLM 0.33 does not have",
        cure="vllm-bnb-plugin",
    ),
    case(
        "exl3",
        "released glm-4.7",
        config("quantization_config", {"quant_method": "exl3", "bits": 4.0}),
        rename(rf"({PROJECTIONS})\.weight", r"\1.trellis"),
        where="quantization_config.quant_method",
        says="'Unknown quantization method: exl3'",
    ),
    case(
        "MLX",
        "released glm-4.7",
        config("quantization", MLX),
        rename(rf"({PROJECTIONS})\.weight", r"\1.scales"),
        where="config.json: quantization",
        says="is MLX's",
    ),
    case(
        "newer MLX",
        "released glm-4.7",
        config("quantization", MLX),
        config("quantization_config", MLX),
        rename(rf"({PROJECTIONS})\.weight", r"\1.scales"),
        where="config.json: quantization",
        says="is MLX's",
    ),
    case(
        "a deprecated method",
        "released glm-4.7",
        config("quantization_config", {"quant_method": "fbgemm_fp8"}),
        where="quant_method",
        says="deprecated",
    ),
    case(
        "the plugin of bitsandbytes, and no block",
        llama,
        config("quantization_config", BITSANDBYTES),
        cure="vllm-bnb-plugin",
        says="vllm-bnb-plugin (vllm #43529). Tensors named as those of an MTP block: 0",
    ),
    case(
        "a method of no family",
        "released glm-4.7",
        config("model_type", "never_seen"),
        config("architectures", ["NeverSeen"]),
        config("quantization_config", {"quant_method": "hqq"}),
    ),
)


test_unread = finds(
    "files",
    met(
        "E6 num_hidden_layers lost",
        "glm fp8",
        config("num_hidden_layers", None),
        rule="config",
        where="config.json",
    ),
    met(
        "M8 index names a missing file",
        "glm fp8",
        indexed("model.norm.weight", "gone.safetensors"),
        where="model.safetensors.index.json",
        says="gone.safetensors",
    ),
    met(
        "M8 index names a missing tensor",
        "glm fp8",
        indexed("model.extra.weight", "model-1.safetensors"),
        where="model-1.safetensors",
        says="model.extra.weight",
    ),
    met("R6 shard cut short", "glm fp8", cut, where="model-2.safetensors"),
)


test_objections_without_family = finds(
    "family",
    met(
        "R8 a family without a table",
        "glm fp8",
        config("model_type", "glm4v_moe"),
        where="config.json",
        says="glm4v_moe",
    ),
    case(
        "a classic block with DSpark's key",
        "released dsv4-flash",
        config("dspark_target_layer_ids", [0, 1, 2]),
        found=[],
    ),
    case(
        "a block that nobody can judge",
        partial(llama, "awq"),
        tensor("mtp.fc.weight", "BF16", 256, 512),
    ),
    case(
        "a scheme that is not known",
        partial(llama, "quark"),
        quantization("global_quant_config", {"weight": INT4}),
        found=[
            {"rule": "dialect", "severity": "warning", "says": "weights are not judged against it"},
            {"severity": "warning", "says": "Judged: 0 of 42"},
        ],
    ),
    case(
        "a plain layer in a scheme that is not known",
        partial(llama, "quark"),
        quantization("global_quant_config", {"weight": INT4}),
        lose(r"model\.layers\.2\.mlp\.down_proj\..*"),
        tensor("model.layers.2.mlp.down_proj.weight", "BF16", 256, 512),
        rule="form",
        where="model.layers.2.mlp.down_proj.weight",
        among=True,
    ),
)


@pytest.mark.parametrize(
    "model", ["glm-4.7", "qwen3.5-27b", "nemotron-3-super", "mimo-v2-flash", "ernie-4.5-21b"]
)
@pytest.mark.parametrize("format", ["compressed-tensors", "modelopt"])
def test_scales_of_the_cache_that_keepmtp_writes_pass_without_a_word(model, format, tmp_path):
    checkpoint = with_scales(model, format)
    assert len([name for name in checkpoint.tensors if name.endswith(("k_scale", "v_scale"))]) >= 4
    assert check(as_source(checkpoint, tmp_path)).findings == ()


def test_it_is_found_before_anything_is_read(tmp_path):
    """GLM-4.7's names: the layer after the last is its MTP block."""
    checkpoint = changed(
        GOOD["released glm-4.7"], config("quantization_config", {"quant_method": "exl3"})
    )
    found = examine(write(tmp_path / "checkpoint", checkpoint))
    block = sum(name.startswith("model.layers.3.") for name in checkpoint.tensors)
    assert f"Tensors named as those of an MTP block: {block}" in found.data.findings[0].says
    facts = found.data.facts
    assert (facts.num_mtp_tensors, facts.num_tensors) == (block, len(checkpoint.tensors))
    assert found.source is None


@pytest.mark.parametrize("version", KNOWN)
@pytest.mark.parametrize(
    "given, versions, built, before",
    [
        (
            {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]},
            ">=0.33",
            "plain",
            "nvfp4_modelopt",
        ),
        ({"quant_algo": "NVFP4", "ignore": ["lm_head"]}, ">=0", "plain", ""),
        ({"quant_algo": "NVFP4", "ignore": [], "exclude_modules": ["lm_head"]}, ">=9", "", ""),
    ],
)
def test_a_dialect_is_that_of_the_version(given, versions, built, before, version):
    raw = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", **given}
    dialect = choose.read_dialect({"quantization_config": raw}, None, vllm=version)
    found = dialect.resolve(VLLMName("lm_head"), shards=(), kind="head").built.form
    expected = built if holds(versions, version) else before
    assert found == (expected or "nvfp4_modelopt")


def test_a_family_is_that_of_the_version():
    for version in KNOWN:
        before = version != "0.33.0"
        layouts = families(version)["nemotron_h"].layouts.values()
        heads = {layout.draft_head for layout in layouts}
        assert heads == ({"lm_head"} if before else {""})
        block = {row.path: row for row in families(version)["inkling_model"].mtp_block}
        assert block["input_proj"].loads_quantized != before
        assert block["transformer_block.attn.wo_ud"].loads_quantized != before
        assert not block["transformer_block.mlp_norm"].loads_quantized


def test_other_names_are_those_of_methods():
    assert set(choose.ALIASES.values()) <= asked().methods
    assert asked().deprecated_methods < asked().methods


def test_report_as_json(tmp_path):
    checkpoint = GOOD["glm fp8"]()
    checkpoint.take(r"model\.layers\.3\.hnorm\.weight")
    report = json.loads(json.dumps(check_json(check(write(tmp_path / "checkpoint", checkpoint)))))
    assert (report["ok"], report["path"]) == (False, str(tmp_path / "checkpoint"))
    assert {"severity", "where", "says", "cure", "rule"} <= report["findings"][0].keys()
    assert report["facts"]["num_mtp_layers"] == 1
    assert report["facts"]["dialect"] == "compressed-tensors"


def test_nothing_there_is_a_finding(tmp_path):
    report = check(tmp_path)
    assert [f.rule for f in report.findings] == ["files"]
    assert "config.json" in report.findings[0].says
