"""quantize/pack/search.py against the observers of llm-compressor, and against trying every scale."""

import pytest
import torch
import yaml
from keepmtp.checkpoints import values as values_module
from keepmtp.checkpoints.dequantize import dequantize
from keepmtp.checkpoints.source import open_source
from keepmtp.quantize.pack.pack import pack
from keepmtp.quantize.plan.plan import make_plan
from keepmtp.recipes.errors import RecipeError
from keepmtp.recipes.find import find_recipe
from keepmtp.recipes.schema import validated
from keepmtp.recipes.schemes import SCHEMES, SEARCHED
from writing import tiny, weights_of, written

SWEPT = sorted(SEARCHED - {"NVFP4"})  # its weights are NVFP4A16's
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E4M3 = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


pytestmark = pytest.mark.usefixtures("one_thread")


def weights(shape: tuple[int, int] = (64, 512)) -> dict[str, torch.Tensor]:
    """BF16 weights [N, K] of several distributions."""
    rng = torch.Generator().manual_seed(0)
    normal = torch.randn(shape, generator=rng)
    rows = torch.randn(shape[0], 1, generator=rng).mul(0.5).exp()
    found = {
        "normal": normal * rows,
        "long tails": normal * normal.square(),
        "even": torch.rand(shape, generator=rng) - 0.5,
    }
    return {kind: (weight * 0.02).bfloat16() for kind, weight in found.items()}


def found_by(name: str, weight: torch.Tensor, search: str) -> dict[str, torch.Tensor]:
    (found,) = pack(SCHEMES[name], [weight], search=search)
    return found


def error_of(name: str, packed: dict[str, torch.Tensor], weight: torch.Tensor) -> float:
    """The squared error."""
    scheme = SCHEMES[name]
    values = dequantize(scheme.form, packed, shape=tuple(weight.shape), block=scheme.block).double()
    return float((values - weight.double()).square().sum())


def nearest_e2m1(scaled: torch.Tensor) -> torch.Tensor:
    """Of magnitudes, by comparing with all eight."""
    return E2M1[(scaled.unsqueeze(-1) - E2M1).abs().argmin(-1)]


def errors_of_all_scales(
    weight: torch.Tensor, global_scale: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    """[groups, scales]: the squared error of each group of 16 under each E4M3 scale."""
    groups = weight.double().abs().view(-1, 16)
    units = (scales / global_scale).double()
    errors = [(groups - unit * nearest_e2m1(groups / unit)).square() for unit in units]
    return torch.stack([error.sum(1) for error in errors], 1)


@pytest.mark.parametrize("kind", ["normal", "long tails", "even"])
def test_nvfp4_takes_the_best_of_all_126_scales(kind):
    """What modelopt's NVFP4MSECalibrator finds by trying each: the table's values are 0.4 % of a
    step apart.
    """
    weight = weights()[kind]
    found, plain = (found_by("NVFP4A16", weight, search) for search in ("mse", ""))
    assert torch.equal(found["weight_global_scale"], plain["weight_global_scale"])
    errors = errors_of_all_scales(weight, found["weight_global_scale"], E4M3)
    own = errors.gather(1, found["weight_scale"].view(torch.uint8).view(-1, 1).long() - 1).sum()
    assert own <= errors.amin(1).sum() * 1.002
    assert own < 0.9 * error_of("NVFP4A16", plain, weight)


@pytest.mark.parametrize("name", SWEPT)
def test_the_error_is_below_that_of_llm_compressors_observer(name):
    """`memoryless_mse` as it is, and with the square that it is called after (it minimizes the power
    2.4). It also moves zero points, by the rounding of the range that it shrinks; the search leaves
    them.
    """
    weight = weights((32, 256))["normal"]
    plain, mse = (found_by(name, weight, search) for search in ("", "mse"))
    assert error_of(name, mse, weight) < error_of(name, plain, weight)
    # A scale that is as good may be another.
    allowed = 1.002 if SCHEMES[name].has_zero_point else 1.0001
    for knobs in ({}, {"norm": 2.0}):
        theirs = by_observer(name, weight, knobs)
        assert error_of(name, mse, weight) < error_of(name, theirs, weight) * allowed, knobs


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    for suffix, value in one.items():
        assert torch.equal(value.view(torch.uint8), other[suffix].view(torch.uint8)), suffix


def by_observer(
    name: str, weight: torch.Tensor, knobs: dict[str, float]
) -> dict[str, torch.Tensor]:
    """What llm-compressor packs with scales of its observer."""
    from compressed_tensors.compressors import compress_module
    from compressed_tensors.quantization import QuantizationScheme
    from llmcompressor.entrypoints.model_free.lifecycle import initialize_quantized_linear
    from llmcompressor.modifiers.quantization import calibration

    scheme = QuantizationScheme(targets=["Linear"], **SCHEMES[name].config_group())
    assert scheme.weights is not None
    scheme.weights.observer, scheme.weights.observer_kwargs = "memoryless_mse", knobs
    module = initialize_quantized_linear(weight, scheme, weight.device)
    calibration.initialize_observer(module, "weight")
    calibration.apply_calibration_status(module)
    calibration.observe([module], base_name="weight")
    calibration.update_qparams([module], base_name="weight")
    calibration.freeze_module_quantization(module)
    compress_module(module)
    return module.state_dict()


@pytest.mark.parametrize("name", SWEPT)
def test_chunks_and_batches_change_no_byte(name, monkeypatch):
    """Rows, blocks at the edges and fused groups; a sum of integers has no order."""
    scheme = SCHEMES[name]
    group = [*weights((130, 384 + (0 if scheme.k_multiple() > 1 else 72))).values()]
    whole = pack(scheme, group, search="mse")
    monkeypatch.setattr(values_module, "_CHUNK_CPU", 1024)
    for one, other in zip(whole, pack(scheme, group, search="mse"), strict=True):
        assert_equal(one, other)


@pytest.mark.parametrize("name", SWEPT)
def test_values_that_make_trouble_do_not_get_worse(name):
    """Zeros, subnormals, a single value in a row, huge ones, F32 and F16 weights."""
    normal = torch.randn(16, 256, generator=torch.Generator().manual_seed(1))
    alone, zeros = torch.zeros_like(normal), torch.zeros_like(normal)
    alone[:, 3] = normal[:, 3]
    hard = [zeros, -zeros, alone, normal * 1e-39, normal * 1e-30, normal * 1e37]
    given = [(each.bfloat16(), 1.01) for each in hard]
    for weight, allowed in [*given, (normal.half(), 1.0), (normal, 1.0)]:
        found, plain = (found_by(name, weight, search) for search in ("mse", ""))
        # NaN is not small either.
        assert error_of(name, found, weight) <= error_of(name, plain, weight) * allowed


@pytest.mark.parametrize("name", sorted(SCHEMES.keys() - SEARCHED))
def test_other_schemes_of_the_recipe_are_rounded_as_without_it(name):
    weight = weights()["normal"]
    assert_equal(found_by(name, weight, "mse"), found_by(name, weight, ""))


def recipe_with(model: str, scheme: str, **changes):
    return validated(find_recipe(model, scheme=scheme)[0].model_dump() | changes, "mine")


def test_a_recipe_with_search_packs_the_backbone_and_the_block_by_it(tmp_path):
    source = tiny(tmp_path / "source", "glm-4.7")
    recipe = recipe_with("glm-4.7", "NVFP4A16", search="mse", mtp="NVFP4A16")
    plan = make_plan(recipe, open_source(source))
    assert all(t.reason.endswith("; scales by mse") for t in plan.tensors if t.fate == "quantize")
    text = yaml.safe_dump(recipe.model_dump(mode="json"))
    made, weight = written(plan, tmp_path / "out", recipe_text=text), weights_of(source)
    assert find_recipe(str(tmp_path / "out" / "recipe.yaml"))[0].search == "mse"
    for module in ("model.layers.1.self_attn.o_proj", "model.layers.3.self_attn.o_proj"):
        expected = found_by("NVFP4A16", weight[f"{module}.weight"], "mse")
        assert_equal(expected, {leaf: made[f"{module}.{leaf}"] for leaf in expected})


@pytest.mark.parametrize(
    "scheme, search, words",
    [
        ("MXFP4", "mse", "search: mse must come with FP8_BLOCK, FP8_DYNAMIC, NVFP4"),
        ("FP8", "mse", "search: mse must come with FP8_BLOCK, FP8_DYNAMIC, NVFP4"),
        ("w4a16-gptq", "mse", r"rounded to nearest; got calibration\.algorithm gptq"),
    ],
)
def test_a_search_without_a_meaning_is_refused(scheme, search, words):
    """Nor beside an algorithm with scales of its own."""
    with pytest.raises(RecipeError, match=words):
        recipe_with("glm-4.7", scheme, search=search)
