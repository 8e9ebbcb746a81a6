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
from tables import cases

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
    for scheme, mtp in PAIRS:
        if (found := fit_of(model, scheme, mtp)) is None or found[1].obstacles:
            continue
        plan, config = found[0], found[1].value
        for matrix in matrices_of(plan):
            for name in sglang_table.names(plan.view, matrix.place):
                for fused in (FUSED_IN_QWEN35 if "qwen3.5" in model else FUSED, {}):
                    group = group_of(config, name, fused) or {}
                    want = SCHEMES[matrix.scheme].config_group() if matrix.scheme else {}
                    assert group.get("weights") == want.get("weights"), name


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
    assert sglang_table.counted("compressed-tensors") == {"yes": 129, "no": 85, "-": 2}
    assert sglang_table.counted("modelopt") == {"yes": 76, "no": 62, "-": 6}
    assert sglang_table.DOCS.read_text() == sglang_table.text(), "run `make picture`"


def test_an_entry_that_would_exclude_the_backbone_in_vllm_is_an_obstacle():
    """MiMo's draft has no prefix in SGLang, and vLLM takes an entry for a substring."""
    fit = config_of(good.planned("mimo-7b", "NVFP4", "bf16", format="modelopt"))
    assert "would exclude model.layers.0" in fit.line


@cases
def test_an_obstacle_is_named_with_sglangs_file(model, scheme, mtp, says):
    found = fit_of(model, scheme, mtp)
    assert found
    assert (says in found[1].line and ".py)" in found[1].line) or "(models)" in found[1].line
    plan, config = found[0], found[1].value
    asked = {name for module in modules_of(plan) for name in (module.name, *module.asked)}
    entries = [*config["ignore"]]
    for group in config["config_groups"].values():
        entries += group["targets"]
    for matrix in matrices_of(plan):
        for name in {*sglang_table.names(plan.view, matrix.place)} - asked:
            assert not any(re.match(entry[3:], name) for entry in entries), "an entry for SGLang"
