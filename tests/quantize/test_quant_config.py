"""The written targets and ignore list against the full list of runtime modules: exact, both
ways.
"""

import random
import re

import pytest
from keepmtp.checkpoints.source import open_source
from keepmtp.quantize.config.compressed_tensors import added_names
from keepmtp.quantize.config.modules import concrete, named_modules, number_regex
from keepmtp.quantize.config.written import config_of, matrices_of, modules_of
from keepmtp.quantize.plan.plan import Plan, make_plan
from keepmtp.recipes.find import find_recipe, shipped_recipes
from releases import source_layout, write_checkpoint

RECIPES = [recipe.name for recipe in shipped_recipes() if not recipe.model.startswith("tiny-")]


def tiny_plan(recipe_name: str, folder, mtp: str | None = None) -> Plan:
    recipe, _ = find_recipe(recipe_name, mtp=mtp)
    config, tensors = source_layout(recipe.model, size="tiny")
    return make_plan(
        recipe.before_measuring, open_source(write_checkpoint(folder, config, tensors))
    )


def hits(entries: list[str], name: str) -> list[str]:
    """Entries that vLLM's compressed-tensors matching applies to `name`: `re:` with re.match, else
    equality.
    """
    return [e for e in entries if (re.match(e[3:], name) if e.startswith("re:") else e == name)]


@pytest.mark.few(112)
@pytest.mark.parametrize("mtp", [None, "bf16", "FP8_DYNAMIC", "W4A16"])
@pytest.mark.parametrize("recipe_name", RECIPES)
def test_every_module_is_covered_exactly_once(recipe_name, mtp, tmp_path):
    """Kept modules are ignored and not targeted, quantized ones targeted by their scheme's group
    alone.
    """
    plan = tiny_plan(recipe_name, tmp_path, mtp)
    found = config_of(plan)
    config, modules = found.value, modules_of(plan)
    assert {module.scheme for module in modules} >= {""}
    asked = [(name, module.scheme) for module in modules for name in (module.name, *module.asked)]
    added, _ = added_names(plan.view, named_modules(plan.view, matrices_of(plan)))
    for scheme, spellings in () if found.obstacles else added.items():
        asked += [(name, scheme) for spelled in spellings for name in concrete(spelled)]
    targets = {
        target: group for group in config["config_groups"].values() for target in group["targets"]
    }
    used: set[str] = set()
    for name, scheme in asked:
        if name.endswith("experts"):
            continue  # vLLM asks about expert 0's projections, never about the container
        targeted, ignored = hits(list(targets), name), hits(config["ignore"], name)
        used.update(targeted + ignored)
        if scheme:
            # A fused name may stand in two entries of one group: not every layer has all the parts.
            groups = [targets[entry] for entry in targeted]
            assert groups and not ignored, f"{name}: targets {targeted}, ignore {ignored}"
            assert all(group == groups[0] for group in groups) and groups[0]["format"], name
        else:
            assert len(ignored) == 1 and not targeted, (
                f"{name}: targets {targeted}, ignore {ignored}"
            )
    opaque = [entry for entry in config["ignore"] if not entry.endswith("$")]
    assert used == {*targets, *config["ignore"]} - set(opaque), "an entry matches no module"


def test_a_neighbouring_layer_is_not_covered(tmp_path):
    """`model.layers.1` must not reach layers 10 to 19, nor the MTP layer the backbone's entries."""
    plan = tiny_plan("glm-4.7", tmp_path)
    config = config_of(plan).value
    last = plan.view.num_layers
    everything = config["ignore"] + [
        t for g in config["config_groups"].values() for t in g["targets"]
    ]
    assert hits(everything, f"model.layers.{last}.self_attn.qkv_proj")
    assert not hits(everything, f"model.layers.{last + 1}.self_attn.qkv_proj")
    assert not hits(everything, f"model.layers.{last}0.self_attn.qkv_proj")
    assert not hits(everything, f"model.layers.{last}.self_attn.qkv_proj.weight")


def test_names_that_versions_of_vllm_disagree_about(tmp_path):
    """DeepSeek-V4's experts were probed as gate_proj before vLLM 0.32 and as w1 since; both must
    resolve alike.
    """
    config = config_of(tiny_plan("dsv4-flash", tmp_path)).value
    targets = [t for group in config["config_groups"].values() for t in group["targets"]]
    for name in ("w1", "w2", "w3", "gate_proj", "up_proj", "down_proj"):
        assert hits(targets, f"model.layers.0.ffn.experts.0.{name}"), name
    assert config["scale_fmt"] == "ue8m0"


def test_number_regex_is_exact():
    rng = random.Random(0)
    for _ in range(300):
        numbers = set(rng.sample(range(130), rng.randint(1, 120)))
        regex = re.compile(f"^{number_regex(numbers)}$")
        assert {n for n in range(1500) if regex.match(str(n))} == numbers
    assert number_regex(range(3, 62)) == r"(?:[3-9]|6[0-1]|[1-5]\d)"
