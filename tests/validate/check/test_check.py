"""The static check: silent on good checkpoints, and each broken one caught by its rule, with the
culprit's name.
"""

import json
import time

import pytest
import releases
from broken import BROKEN, GOOD, WITHOUT_MTP, Case, agree, built
from checkpoint_files import as_source, write
from good import ours, planned, released, with_scales
from keepmtp.checkpoints.dialects import choose
from keepmtp.cli.check import check_json
from keepmtp.recipes.errors import RecipeError
from keepmtp.recipes.families import families
from keepmtp.recipes.family import VLLMName
from keepmtp.recipes.runtimes.vllm import KNOWN, asked, holds
from keepmtp.recipes.schemes import SCHEMES
from keepmtp.validate.check.check import RULES, WITHOUT_FAMILY, check, examine
from modelopt_form import ALGORITHMS, LINEAR_ONLY, modelopt
from tables import cases, table

FINDINGS = table("validate/check/findings")


@pytest.mark.parametrize("name", GOOD)
def test_good_checkpoints_pass_without_a_word(name, tmp_path):
    report = check(write(tmp_path / "checkpoint", GOOD[name]()))
    assert report.findings == ()
    assert report.ok


@pytest.mark.few(280)
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


@pytest.mark.few(54)
@pytest.mark.parametrize("mtp", ["bf16", "as backbone"])
@pytest.mark.parametrize("scheme", [scheme for scheme in ALGORITHMS if scheme not in LINEAR_ONLY])
@pytest.mark.parametrize("model", releases.MODELS)
def test_the_same_told_as_modelopt_tells_it_passes(model, scheme, mtp, tmp_path):
    try:
        checkpoint = modelopt(model, scheme, scheme if mtp == "as backbone" else mtp)
    except RecipeError as error:
        pytest.skip(str(error))
    assert check(as_source(checkpoint, tmp_path)).findings == ()


@pytest.mark.parametrize("case", (*BROKEN, *WITHOUT_MTP), ids=lambda case: case.name)
def test_broken_checkpoints_are_caught(case: Case, tmp_path):
    report = check(write(tmp_path / "checkpoint", case.build()))
    hits = [
        finding
        for finding in report.findings
        if (finding.rule, finding.severity) == (case.rule, case.severity)
        and case.where in finding.where
    ]
    assert hits, report.findings
    assert any(case.says in finding.says for finding in hits), hits
    assert case.severity == "warning" or not report.ok
    assert all(finding.says and finding.cure and finding.where for finding in report.findings)


def test_every_rule_says_what_it_holds_and_has_a_broken_checkpoint():
    assert len({case.rule for case in BROKEN}) >= 26
    assert all(rule.__doc__ for rule in (*RULES, *WITHOUT_FAMILY))


@pytest.mark.parametrize("name", FINDINGS)
def test_each_finding_is_said_in_its_words(name, tmp_path):
    row = FINDINGS[name]
    source = as_source(built(row["source"]), tmp_path) if "source" in row else None
    folder = write(tmp_path / "checkpoint", built(row))
    agree(row, check(folder, source=source, runtimes=row.get("runtimes", ["vllm"])).findings)


@cases
@pytest.mark.parametrize("format", ["compressed-tensors", "modelopt"])
def test_scales_of_the_cache_that_keepmtp_writes_pass_without_a_word(model, format, tmp_path):
    checkpoint = with_scales(model, format)
    assert len([name for name in checkpoint.tensors if name.endswith(("k_scale", "v_scale"))]) >= 4
    assert check(as_source(checkpoint, tmp_path)).findings == ()


def test_it_is_found_before_anything_is_read(tmp_path):
    """GLM-4.7's names: the layer after the last is its MTP block."""
    checkpoint = built(FINDINGS["exl3"])
    found = examine(write(tmp_path / "checkpoint", checkpoint))
    block = sum(name.startswith("model.layers.3.") for name in checkpoint.tensors)
    assert f"{block} tensors are named as those of an MTP block" in found.data.findings[0].says
    facts = found.data.facts
    assert (facts.num_mtp_tensors, facts.num_tensors) == (block, len(checkpoint.tensors))
    assert found.source is None


@pytest.mark.parametrize("version", KNOWN)
@cases
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
        assert {layout.draft_head for layout in layouts} == {"lm_head" if before else ""}
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


@pytest.mark.full
def test_full_size_is_checked_in_seconds(tmp_path):
    try:
        checkpoint = ours("dsv4-flash", "NVFP4", size="full")
    except RecipeError as error:
        pytest.skip(str(error))
    source = as_source(checkpoint, tmp_path)
    assert len(source.entries) > 130_000
    start = time.monotonic()
    assert check(source).findings == ()
    # 5 s on one shared core of 2024; the bound leaves room for a busy machine.
    assert time.monotonic() - start < 30
    planned.cache_clear()
