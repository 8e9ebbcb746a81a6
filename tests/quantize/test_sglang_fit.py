"""What keepmtp writes for SGLang too, judged by SGLang's own functions; and what it says cannot be
written.
"""

import re

import good
import pytest
import releases
import sglang_table
from keepmtp.checkpoints.dialects.written import QuantizationConfig
from keepmtp.quantize.plan.configs import config_of, matrices_of, modules_of
from keepmtp.quantize.plan.plan import Plan
from keepmtp.recipes.errors import RecipeError
from keepmtp.recipes.schemes import SCHEMES
from sglang_wheel import FUSED, FUSED_IN_QWEN35, MISSING, UTILS, group_of

PAIRS = sglang_table.PAIRS["compressed-tensors"]


def fit_of(model: str, scheme: str, mtp: str) -> tuple[Plan, QuantizationConfig] | None:
    """A plan and its config; None where keepmtp refuses the plan."""
    try:
        plan = good.planned(model, scheme, mtp)
    except RecipeError:
        return None
    return plan, config_of(plan)


@pytest.mark.few(12)
@pytest.mark.skipif(not UTILS.is_file(), reason=MISSING)
@pytest.mark.parametrize("model", releases.MODELS)
def test_every_name_resolves_to_its_scheme_by_sglangs_functions(model):
    fused_here = FUSED
    if "qwen3.5" in model:
        fused_here = FUSED_IN_QWEN35
    for scheme, mtp in PAIRS:
        fit = fit_of(model, scheme, mtp)
        if fit is None or fit[1].obstacles:
            continue
        plan, config = fit
        for matrix in matrices_of(plan):
            wanted = {}
            if matrix.scheme:
                wanted = SCHEMES[matrix.scheme].config_group()
            for name in sglang_table.names(plan.view, matrix.place):
                for fused in (fused_here, {}):
                    group = group_of(config.value, name, fused) or {}
                    assert group.get("weights") == wanted.get("weights"), name


@pytest.mark.skipif(not UTILS.is_file(), reason=MISSING)
def test_without_the_added_entries_sglang_raises():
    """The twin: the names that vLLM asks for alone."""
    config = config_of(good.planned("glm-4.7", "FP8_DYNAMIC", "bf16")).value
    alone = config | {"ignore": [entry for entry in config["ignore"] if "decoder" not in entry]}
    name = "model.decoder.self_attn.qkv_proj"
    assert group_of(config, name, FUSED) is None
    with pytest.raises(ValueError, match=f"Unable to find matching target for {name}"):
        group_of(alone, name, FUSED)


@pytest.mark.full
def test_how_many_outputs_resolve_in_both():
    assert sglang_table.counted("compressed-tensors") == {"yes": 129, "no": 103, "-": 2}
    assert sglang_table.counted("modelopt") == {"yes": 76, "no": 74, "-": 6}
    assert sglang_table.DOCS.read_text() == sglang_table.text(), "run `make docs`"


def test_an_entry_that_would_exclude_the_backbone_in_vllm_is_an_obstacle():
    """MiMo's draft has no prefix in SGLang, and vLLM takes an entry for a substring."""
    fit = config_of(good.planned("mimo-7b", "NVFP4", "bf16", format="modelopt"))
    assert "would exclude model.layers.0" in fit.line


@pytest.mark.parametrize(
    ("model", "scheme", "mtp", "says"),
    [
        ("qwen3-next-80b", "FP8_DYNAMIC", "bf16", "it asks for model.layers.0.mlp.experts.0"),
        ("exaone-4.5-33b", "FP8_DYNAMIC", "bf16", "it has no class for the model"),
        ("minimax-m3", "FP8_DYNAMIC", "bf16", "no draft class (models/minimax_m3_vl.py)"),
        ("deepseek-r1", "FP8_BLOCK", "bf16", "kv_b_proj"),
        ("dsv4-flash", "FP8_DYNAMIC", "bf16", "wo_a"),
    ],
)
def test_an_obstacle_is_named_with_sglangs_file(model, scheme, mtp, says):
    fit = fit_of(model, scheme, mtp)
    assert fit
    plan, config = fit
    assert (says in config.line and ".py)" in config.line) or "(models)" in config.line
    asked = set[str]()
    for module in modules_of(plan):
        asked.update((module.name, *module.asked))
    entries = [*config.value["ignore"]]
    for group in config.value["config_groups"].values():
        entries += group["targets"]
    for matrix in matrices_of(plan):
        for name in {*sglang_table.names(plan.view, matrix.place)} - asked:
            assert not any(re.match(entry[3:], name) for entry in entries), "an entry for SGLang"
