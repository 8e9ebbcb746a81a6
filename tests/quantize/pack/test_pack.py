"""quantize/pack/pack.py against the programs whose bytes it promises: compressed-tensors and
llm-compressor.
"""

import pytest
import torch
from data_files import put_json
from keepmtp.checkpoints import values as values_module
from keepmtp.quantize.pack.pack import e8m0_exponents, pack, power_of_two
from keepmtp.recipes.errors import CheckpointError, RecipeError
from keepmtp.recipes.schemes import SCHEMES
from safetensors.torch import load_file, save_file

# MXFP4A8 packs as MXFP4 does and has no preset of its own in compressed-tensors.
ALL = tuple(name for name in SCHEMES if name != "MXFP4A8")
DATA_FREE = tuple(name for name in ALL if not SCHEMES[name].needs_calibration)
# Their tensors hold no BF16 scale, so an F32 weight, too, has exactly the bytes of the peer.
SAME_FOR_F32 = ("NVFP4", "NVFP4A16", "MXFP4", "MXFP4A16", "FP8_BLOCK")
SHAPES = ((1, 128), (5, 256), (130, 128), (16, 1024))
RAGGED_SHAPES = ((127, 200), (129, 130), (1, 1), (257, 64))
E8M0_OVERFLOW = 1.75 * 2.0**127


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of a few rows, so that small weights have many."""
    monkeypatch.setattr(values_module, "_CHUNK_CPU", 1024)


def adversarial_weights(shape: tuple[int, int], seed: int = 0) -> dict[str, torch.Tensor]:
    """BF16 weights [N, K] by the kind of trouble they make."""
    rng = torch.Generator().manual_seed(seed)
    n, k = shape
    groups = -(-k // 16)
    normal = torch.randn(shape, generator=rng)
    patterns = (
        torch.randint(-32768, 32768, shape, generator=rng).to(torch.int16).view(torch.bfloat16)
    )
    row_powers = torch.randint(-140, 120, (n, 1), generator=rng).float().exp2()
    group_powers = (
        torch.randint(-20, 20, (n, groups), generator=rng)
        .float()
        .exp2()
        .repeat_interleave(16, 1)[:, :k]
    )
    # Quarters of a power-of-two scale: every tie of E2M1, with group maxima that make the scale
    # exact.
    fp4_ties = torch.randint(-24, 25, shape, generator=rng).float() / 4
    fp4_ties[:, ::16] = 6.0
    int4_ties = torch.randint(-15, 16, shape, generator=rng).float() / 2
    int4_ties[:, ::128] = 7.5
    int8_ties = torch.randint(-255, 256, shape, generator=rng).float() / 2
    int8_ties[:, ::128] = 127.5
    sparse = (normal * 0.02).where(torch.rand(shape, generator=rng) < 0.03, -0.0)
    subnormal = (
        torch.randint(0, 128, shape, generator=rng).to(torch.int16).view(torch.bfloat16).float()
    )
    huge = (torch.rand(shape, generator=rng) * 2 - 1) * 2.9e38
    weights = {
        "normal": normal * 0.02,
        "row powers": normal * row_powers,
        "group powers": normal * group_powers,
        "fp4 ties": fp4_ties * 2.0**-7,
        "int4 ties": int4_ties,
        "int8 ties": int8_ties,
        "zeros": torch.zeros(shape),
        "negative zeros": -torch.zeros(shape),
        "sparse": sparse,
        "subnormal": subnormal * normal.sign(),
        "huge": huge,
        "patterns": patterns.float().where(
            patterns.isfinite() & (patterns.abs() < E8M0_OVERFLOW), 0.0
        ),
    }
    return {kind: weight.bfloat16() for kind, weight in weights.items()}


def peer_scheme(name: str):
    """compressed-tensors' preset; a group of 32 has none of its own."""
    from compressed_tensors.quantization import preset_name_to_scheme

    scheme = preset_name_to_scheme(name.removesuffix("_G32"), ["Linear"])
    if name.endswith("_G32"):
        scheme.weights.group_size = 32
    return scheme


def peer_pack(name: str, weights: list[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """What llm-compressor's model-free path makes of one fused group, step by step as its converter
    takes them.
    """
    from compressed_tensors.compressors import compress_module
    from llmcompressor.entrypoints.model_free.lifecycle import initialize_quantized_linear
    from llmcompressor.modifiers.quantization import calibration
    from llmcompressor.observers import FusionHandler

    modules = [initialize_quantized_linear(w, peer_scheme(name), w.device) for w in weights]
    for module in modules:
        calibration.initialize_observer(module, "weight")
        calibration.apply_calibration_status(module)
    if len(modules) > 1:
        FusionHandler.fuse([(module.weight_observer, module) for module in modules])
    calibration.observe(modules, base_name="weight")
    calibration.update_qparams(modules, base_name="weight")
    for module in modules:
        calibration.freeze_module_quantization(module)
        compress_module(module)
    inputs = {spec.suffix for spec in SCHEMES[name].extra}  # nothing was observed: empty memory
    return [{k: v for k, v in module.state_dict().items() if k not in inputs} for module in modules]


def assert_same_bytes(
    ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], where: object = ""
) -> None:
    """Equal keys, dtypes, shapes and bytes, but for FP8_BLOCK's scales: same values, stored as
    F32.
    """
    assert set(ours) == set(theirs), where
    for suffix, tensor in ours.items():
        expected = theirs[suffix]
        if suffix == "weight_scale" and tensor.dtype == torch.float32:
            expected = expected.float()
        assert (tensor.dtype, tensor.shape) == (expected.dtype, expected.shape), (where, suffix)
        expected = torch.empty_like(tensor).copy_(expected)  # theirs may be transposed
        different = tensor.reshape(-1).view(torch.uint8) != expected.reshape(-1).view(torch.uint8)
        assert not different.any(), (where, suffix, int(different.sum()))


@pytest.mark.parametrize("name", DATA_FREE)
def test_same_bytes_as_model_free_ptq(name, tmp_path):
    """The real entry point, on a checkpoint on disk, with the fused groups that it knows itself."""
    import llmcompressor

    groups = (
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        ("mlp.gate_proj", "mlp.up_proj"),
        ("mlp.down_proj",),
    )
    rng = torch.Generator().manual_seed(1)
    # K stays a multiple of 128: with another one FP8_BLOCK ends in "non contiguous tensor" when the
    # peer saves.
    weights = {
        module: torch.randn(96 + 40 * i, 256, generator=rng).mul(0.01 * (i + 1)).bfloat16()
        for i, module in enumerate(module for group in groups for module in group)
    }
    (tmp_path / "source").mkdir()
    put_json(tmp_path / "source" / "config.json", {"model_type": "llama"})
    tensors = {f"model.layers.0.{module}.weight": weight for module, weight in weights.items()}
    save_file(tensors, tmp_path / "source" / "model.safetensors")
    llmcompressor.model_free_ptq(
        tmp_path / "source", tmp_path / "out", scheme=peer_scheme(name), device="cpu"
    )
    theirs = load_file(tmp_path / "out" / "model.safetensors")
    for group in groups:
        packed = pack(SCHEMES[name], [weights[module] for module in group])
        for module, ours in zip(group, packed, strict=True):
            stem = f"model.layers.0.{module}."
            assert_same_bytes(ours, {leaf: theirs.pop(stem + leaf) for leaf in ours}, module)
    assert not theirs


@pytest.mark.parametrize("name", ALL)
def test_same_bytes_on_adversarial_values(name, small_chunks):
    """Ties, zeros of both signs, subnormals, huge values and random bit patterns, in many shapes
    and many chunks.
    """
    shapes = SHAPES + (RAGGED_SHAPES if SCHEMES[name].k_multiple() == 1 else ())
    dtypes = (torch.bfloat16, torch.float32) if name in SAME_FOR_F32 else (torch.bfloat16,)
    for seed, shape in enumerate(shapes):
        for kind, weight in adversarial_weights(shape, seed).items():
            for dtype in dtypes:
                given = weight.to(dtype)
                # The peer's scale of a range beyond BF16's is infinite.
                if SCHEMES[name].has_zero_point:
                    given = given.clamp(-1.6e38, 1.6e38)
                (ours,), (theirs,) = pack(SCHEMES[name], [given]), peer_pack(name, [given])
                assert_same_bytes(ours, theirs, (shape, kind, dtype))


@pytest.mark.parametrize("name", [name for name in ALL if name not in SAME_FOR_F32])
def test_f32_weights_divide_by_the_bf16_scale_that_is_stored(name):
    """The peer stores F32 scales here; ours are those in BF16, and the codes belong to them."""
    weight = torch.randn(48, 256, generator=torch.Generator().manual_seed(3)) * 0.02
    (ours,), (theirs,) = pack(SCHEMES[name], [weight]), peer_pack(name, [weight])
    assert theirs["weight_scale"].dtype == torch.float32
    scale = ours["weight_scale"]
    assert torch.equal(scale, theirs["weight_scale"].bfloat16())
    if "weight" in ours:
        codes = weight / scale.reshape(-1, 1).float()
        if name == "W8A8":
            codes = codes.round().clamp(-128, 127)
        assert torch.equal(ours["weight"].float(), codes.to(ours["weight"].dtype).float())


@pytest.mark.parametrize("name", ALL)
def test_equal_values_give_equal_bytes(name, small_chunks):
    """F16 counts as F32, and a weight that is not contiguous as its copy."""
    weight = torch.randn(256, 40, generator=torch.Generator().manual_seed(4)).mul(0.02).half().t()
    stored = weight.bfloat16()
    for one, other in ((weight, weight.float()), (stored, stored.contiguous())):
        assert_same_bytes(pack(SCHEMES[name], [one])[0], pack(SCHEMES[name], [other])[0])


def test_fused_group_of_two_dtypes():
    rng = torch.Generator().manual_seed(8)
    group = [
        torch.randn(16, 128, generator=rng) * 0.02,
        torch.randn(16, 128, generator=rng).mul(0.01).bfloat16(),
    ]
    for weights in (group, group[::-1]):
        packed = pack(SCHEMES["NVFP4A16"], weights), peer_pack("NVFP4A16", weights)
        for ours, theirs in zip(*packed, strict=True):
            assert_same_bytes(ours, theirs)


def test_e8m0_exponent_of_every_bf16_magnitude():
    """All 32,640 finite magnitudes; where the peer's power of two overflows to NaN, ours stays
    finite.
    """
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams

    amax = torch.arange(0x7F80).to(torch.int16).view(torch.bfloat16)
    scale, _ = calculate_qparams(-amax, amax, preset_name_to_scheme("MXFP4", ["Linear"]).weights)
    expected = 127 + scale.float().log2().floor()
    found = e8m0_exponents(amax)
    in_range = amax < E8M0_OVERFLOW
    assert torch.equal(found[in_range], expected[in_range].int())
    assert torch.equal(power_of_two(found, torch.bfloat16)[in_range], scale[in_range])
    assert expected[~in_range].isinf().all() and (found[~in_range] == 253).all()


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_inf_are_refused(name, value, small_chunks):
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        weight = torch.ones(64, 128, dtype=dtype)
        weight[63, 77] = value
        with pytest.raises(CheckpointError, match="finite"):
            pack(SCHEMES[name], [torch.ones(4, 128).to(dtype), weight])


WIDE = torch.tensor([[3e38, -3e38]]).repeat(8, 64).bfloat16()


def test_other_tensors_are_refused():
    ones = torch.ones
    for weight in (ones(128), ones(2, 16, 128), ones(0, 128), ones(16, 128, dtype=torch.int8)):
        with pytest.raises((CheckpointError, RecipeError), match="matrix"):
            pack(SCHEMES["FP8_DYNAMIC"], [weight])
    with pytest.raises(CheckpointError, match="the range of a group must be finite; got Inf"):
        pack(SCHEMES["W4A16_ASYM"], [WIDE])
    pack(SCHEMES["W4A16_G32"], [WIDE])
