"""The static check: silent on good checkpoints, and each broken one caught by its rule, with the
culprit's name.
"""

import json
import time

import foreign_form
import pytest
import releases
from broken import BROKEN, GOOD, Case
from checkpoint_files import as_source, hf_quant_config, quantization, write
from good import ours, planned, released
from keepmtp.cli.check import check_json
from keepmtp.recipes.errors import RecipeError
from keepmtp.recipes.schemes import SCHEMES
from keepmtp.validate.check.check import RULES, check, check_source
from modelopt_form import ALGORITHMS, LINEAR_ONLY, in_hf_quant_config, mixed_in_two_files, modelopt
from real_releases import dspark_flash


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
    report = check_source(
        as_source(checkpoint, tmp_path), source=as_source(released(model), tmp_path)
    )
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
    assert check_source(as_source(checkpoint, tmp_path)).findings == ()


@pytest.mark.parametrize("case", BROKEN, ids=lambda case: case.name)
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


def test_stages_of_dspark_are_one_finding(tmp_path):
    """And the twin: a classic block of the same model that lost a part is still one that lost a
    part.
    """
    [finding] = check(write(tmp_path / "dspark", dspark_flash())).findings
    assert finding.rule == "family" and '"method": "dspark"' in finding.cure
    classic = dspark_flash()
    del classic.config["dspark_target_layer_ids"]
    assert {each.rule for each in check(write(tmp_path / "classic", classic)).findings} >= {
        "mtp-incomplete"
    }


def test_a_classic_block_with_dsparks_key_is_a_classic_block(tmp_path):
    checkpoint = released("dsv4-flash")
    good = check(write(tmp_path / "good", checkpoint))
    checkpoint.config["dspark_target_layer_ids"] = [0, 1, 2]
    assert check(write(tmp_path / "key", checkpoint)).findings == good.findings == ()


@pytest.mark.parametrize(
    ("build", "effect"),
    [
        (lambda: in_hf_quant_config(modelopt("glm-4.7")), "builds a plain model"),
        (lambda: mixed_in_two_files(here=[], there=["lm_head"]), "Unsupported quantization config"),
    ],
    ids=["alone", "beside config.json"],
)
def test_a_file_of_another_producer_is_not_read_as_modelopts(build, effect, tmp_path):
    """vLLM 0.32.0: transformers_utils/model_arch_config_convertor.py;
    model_loader/weight_utils.py.
    """
    checkpoint = build()
    folder = write(tmp_path / "good", checkpoint)
    assert check(folder).ok
    checkpoint.json_files["hf_quant_config.json"]["producer"] = {"name": "other", "version": "1"}
    folder = write(tmp_path / "other", checkpoint)
    (finding,) = [each for each in check(folder).findings if each.severity == "error"]
    assert (finding.rule, finding.where) == ("algorithm", "hf_quant_config.json: producer.name")
    assert effect in finding.says


def test_every_rule_has_a_broken_checkpoint():
    names = {case.rule for case in BROKEN}
    assert names >= {
        "algorithm",
        "alias",
        "config",
        "config-group",
        "dialect",
        "draft-head",
        "experts",
        "extras",
        "family",
        "files",
        "form",
        "fused-uniform",
        "glue",
        "kv-cache",
        "kv-scales",
        "layer-incomplete",
        "layer-missing",
        "mtp-incomplete",
        "mtp-missing",
        "mtp-not-promised",
        "mtp-prefix",
        "scale-dtype",
        "shapes",
        "two-configs",
        "unindexed",
        "unknown-tensor",
    }
    assert all(rule.__doc__ for rule in RULES)


@pytest.mark.parametrize(
    ("change", "where", "says"),
    [
        (
            lambda c: c.retype(r"mtp\.0\.hc_attn_fn", "BF16"),
            "mtp.0.hc_attn_fn",
            "in the source F32",
        ),
        (
            lambda c: c.retype(r"mtp\.0\.attn_norm\.weight", shape=lambda n: (n + 1,)),
            "mtp.0.attn_norm.weight",
            "512",
        ),
        (lambda c: c.take(r"mtp\.0\.ffn\.gate\.bias"), "mtp.0.ffn.gate.bias", "source's MTP block"),
        (
            lambda c: c.take(r"mtp\.0\.attn\.wq_b\.weight"),
            "mtp.0.attn.wq_b.weight",
            "source's MTP block",
        ),
    ],
    ids=["E4 float32 lost", "E8 another shape", "C3 parameter lost", "C3 weight lost"],
)
def test_the_mtp_block_is_compared_with_the_source(change, where, says, tmp_path):
    checkpoint = ours("dsv4-flash", "W4A16")
    change(checkpoint)
    source = as_source(released("dsv4-flash"), tmp_path)
    report = check(write(tmp_path / "checkpoint", checkpoint), source=source)
    assert [
        f for f in report.findings if f.rule == "source" and where in f.where and says in f.says
    ], report.findings


def test_a_dialect_that_is_not_reproduced_is_said_to_be(tmp_path):
    checkpoint = released("glm-4.7")
    quantization(quant_method="torchao", modules_to_not_convert=["model.layers.3."])(checkpoint)
    report = check(write(tmp_path / "checkpoint", checkpoint))
    assert [(f.rule, f.severity) for f in report.findings] == [("dialect", "warning")]
    assert "--gpu sm90" in report.findings[0].cure and "static" not in report.findings[0].cure


def test_a_form_that_is_not_reproduced_is_said_to_be(tmp_path):
    checkpoint = foreign_form.quark(exclude=[r"re:model\.layers\.3\."])
    weight = {"dtype": "int4", "qscheme": "per_group", "group_size": 32, "symmetric": True}
    checkpoint.quantization["global_quant_config"] = {"weight": weight}
    (finding,) = check(write(tmp_path / "one", checkpoint)).findings
    assert (finding.rule, finding.severity) == ("dialect", "warning")
    del checkpoint.quantization["export"]
    findings = check(write(tmp_path / "two", checkpoint)).findings
    assert {f.rule for f in findings} == {"config-group"} and "export key" in findings[0].says


def test_of_two_lists_the_one_counts_that_vllm_reads(tmp_path):
    """Without quantized_layers in config.json vLLM 0.32 reads all of hf_quant_config.json; with
    them, none of it.
    """
    right, wrong = ["lm_head"], ["lm_head", "model.layers.1.self_attn*"]
    good = write(tmp_path / "good", mixed_in_two_files(here=wrong, there=right))
    assert check(good).findings == ()
    findings = check(
        write(tmp_path / "broken", mixed_in_two_files(here=right, there=wrong))
    ).findings
    assert any(
        each.rule == "form" and each.where.startswith("model.layers.1.self_attn")
        for each in findings
    )
    for here, there, rules in ((right, wrong, set()), (wrong, right, {"form"})):
        checkpoint = GOOD["glm modelopt"]()
        checkpoint.quantization["ignore"] = checkpoint.quantization["ignore"] + here
        hf_quant_config(exclude_modules=[*GOOD["glm modelopt"]().quantization["ignore"], *there])(
            checkpoint
        )
        findings = check(write(tmp_path / f"{here}", checkpoint)).findings
        assert {each.rule for each in findings} == rules


def test_one_cause_is_one_finding(tmp_path):
    checkpoint = GOOD["next nvfp4"]()
    checkpoint.quantization["ignore"] = [
        e for e in checkpoint.quantization["ignore"] if ".experts." not in e
    ]
    report = check(write(tmp_path / "checkpoint", checkpoint))
    assert [(f.rule, f.count) for f in report.findings] == [("form", 12)]
    assert report.findings[0].where.startswith("mtp.layers.0.mlp.experts.0.")
    assert "re:^mtp\\.layers\\.0\\." in report.findings[0].cure


def test_one_entry_for_a_part_of_every_layer_is_one_finding(tmp_path):
    checkpoint = foreign_form.autoround(
        extra_config={r".*layers\.3\..*": {"bits": 16}, ".*q_proj": {"bits": 8}}
    )
    (finding,) = check(write(tmp_path / "checkpoint", checkpoint)).findings
    assert (finding.rule, finding.where, finding.count) == ("config-group", ".*q_proj", 3)


@pytest.mark.parametrize(
    "name", ["Fp2 blocks of four dimensions under compressed-tensors", "M10 FP8 blocks without"]
)
def test_one_cause_is_one_finding_for_each_part(name, tmp_path):
    """Sizes and names in a sentence do not make another cause."""
    case = next(case for case in BROKEN if case.name.startswith(name))
    found = check(write(tmp_path / "checkpoint", case.build())).findings
    assert len(found) <= 2 and sum(finding.count for finding in found) > 10


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


def test_attention_without_low_rank_queries_is_another_layout(tmp_path):
    checkpoint = released("deepseek-r1")
    checkpoint.config["q_lora_rank"] = None
    for layer in range(4):
        stem = f"model.layers.{layer}.self_attn"
        checkpoint.take(rf"{stem}\.(q_a_proj|q_a_layernorm)\..*")
        checkpoint.rename(rf"({stem}\.)q_b_proj(\..*)", r"\1q_proj\2")
    assert check(write(tmp_path / "checkpoint", checkpoint)).findings == ()


@pytest.mark.full
def test_full_size_is_checked_in_seconds(tmp_path):
    try:
        checkpoint = ours("dsv4-flash", "NVFP4", size="full")
    except RecipeError as error:
        pytest.skip(str(error))
    source = as_source(checkpoint, tmp_path)
    assert len(source.entries) > 130_000
    start = time.monotonic()
    assert check_source(source).findings == ()
    # 5 s on one shared core of 2024; the bound leaves room for a busy machine.
    assert time.monotonic() - start < 30
    planned.cache_clear()
