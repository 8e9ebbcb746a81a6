"""The written targets and ignore list against the full list of runtime modules: exact, both
ways.
"""

import random
import re

import pytest
from keepmtp.checkpoints.dialects.modules import concrete, number_regex, runtime_modules
from keepmtp.checkpoints.sglang.entries import added_names
from keepmtp.checkpoints.source import open_source
from keepmtp.quantize.plan.configs import config_of, modules_of
from keepmtp.quantize.plan.plan import Plan, make_plan
from keepmtp.recipes.find import find_recipe
from releases import shipped_recipes
from writing import tiny

RECIPES = [recipe.name for recipe in shipped_recipes() if not recipe.model.startswith("tiny-")]


def tiny_plan(recipe_name: str, folder, mtp: str | None = None) -> Plan:
    recipe, _ = find_recipe(recipe_name, mtp=mtp)
    return make_plan(
        recipe.before_measuring, open_source(tiny(folder / "s", recipe.model, "sparse"))
    )


def hits(entries: list[str], name: str) -> list[str]:
    """Entries that vLLM's compressed-tensors matching applies to `name`: `re:` with re.match, else
    equality.
    """
    return [e for e in entries if (re.match(e[3:], name) if e.startswith("re:") else e == name)]


@pytest.mark.few(112, 224)
@pytest.mark.parametrize("mtp", [None, "bf16", "FP8_DYNAMIC", "W4A16"])
@pytest.mark.parametrize("recipe_name", RECIPES)
def test_every_module_is_covered_exactly_once(recipe_name, mtp, tmp_path):
    """Kept modules are ignored and not targeted, quantized ones targeted by their scheme's group
    alone.
    """
    plan = tiny_plan(recipe_name, tmp_path, mtp)
    found = config_of(plan)
    config, modules = found.value, runtime_modules(modules_of(plan))
    assert {module.scheme for module in modules} >= {""}
    asked = [(name, module.scheme) for module in modules for name in (module.name, *module.asked)]
    added, _ = added_names(plan.view, modules_of(plan))
    for module in () if found.obstacles else added:
        asked += [(name, module.scheme) for name in concrete(module.spelled)]
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


@pytest.mark.parametrize(
    ("recipe_name", "formats", "experts"),
    [
        (
            "glm-4.7",
            ["nvfp4-pack-quantized", "float-quantized"],
            r"re:^model\.layers\.[1-2]\.mlp\.experts\.\d+\.(?:down_proj|gate_proj|up_proj)$",
        ),
        (
            "dsv4-flash",
            ["nvfp4-pack-quantized", "float-quantized"],
            r"re:^(?:model\.layers\.|layers\.)[0-2]\.ffn\.experts\.\d+\.(?:down_proj|gate_proj|up_proj|w1|w2|w3)$",
        ),
    ],
)
def test_what_is_written(recipe_name, formats, experts, tmp_path):
    """No entry of `model.layers.1` reaches layers 10 to 19, nor one of the backbone the MTP layer.
    DeepSeek-V4's experts were probed as gate_proj before vLLM 0.32 and as w1 since: both resolve.
    """
    config = config_of(tiny_plan(recipe_name, tmp_path)).value
    said = (config["quant_method"], config["format"], config["quantization_status"])
    assert said == ("compressed-tensors", "mixed-precision", "compressed")
    groups = list(config["config_groups"].values())
    assert [group["format"] for group in groups] == formats
    assert groups[0]["targets"] == [experts]
    entries = config["ignore"] + groups[0]["targets"] + groups[1]["targets"]
    assert all(entry.startswith("re:^") and entry.endswith("$") for entry in entries)


def test_number_regex_is_exact():
    rng = random.Random(0)
    for _ in range(300):
        numbers = set(rng.sample(range(130), rng.randint(1, 120)))
        regex = re.compile(f"^{number_regex(numbers)}$")
        assert {n for n in range(1500) if regex.match(str(n))} == numbers
    assert number_regex(range(3, 62)) == r"(?:[3-9]|6[0-1]|[1-5]\d)"
