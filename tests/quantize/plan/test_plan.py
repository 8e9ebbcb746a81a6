"""The plan's refusals, each before a byte is written, and what it takes over from where."""

import re
import time
from collections import Counter
from itertools import chain, product

import pytest
from data_files import cases
from keepmtp.checkpoints.source import open_source
from keepmtp.quantize.plan.plan import Plan, make_plan
from keepmtp.quantize.plan.tensor_plan import TensorPlan
from keepmtp.recipes import match_clock
from keepmtp.recipes.errors import CheckpointError, RecipeError
from keepmtp.recipes.find import find_recipe
from releases import source_layout, write_checkpoint, write_shard
from writing import recipe_with


def plan_of(folder, model="glm-4.7", *, tensors=None, config=None, **changes):
    usual_config, usual = source_layout(model)
    if tensors is None:
        tensors = usual
    write_checkpoint(folder, usual_config | (config or {}), tensors)
    return make_plan(recipe_with(model, **changes), open_source(folder))


def without(model: str, pattern: str) -> dict:
    _, tensors = source_layout(model)
    return {name: spec for name, spec in tensors.items() if not re.match(pattern, name)}


def tensor_of(plan: Plan, module: str) -> TensorPlan:
    (tensor,) = (tensor for tensor in plan.tensors if tensor.module == module)
    return tensor


@pytest.mark.few(1)
@pytest.mark.parametrize("words", ["keep", "overrides"])
@pytest.mark.parametrize("pattern", ["re:([a-z0-9._]+)*!", "re:(.*.*.*.*.*.*.*.*.*.*)*_"])
def test_a_regex_without_end_is_refused(words, pattern, tmp_path, monkeypatch):
    monkeypatch.setattr(match_clock, "MATCHING_SECONDS", 0.3)
    start = time.process_time()
    given = {"keep": [pattern], "overrides": [{"modules": pattern, "scheme": "bf16"}]}
    with pytest.raises(RecipeError) as caught:
        plan_of(tmp_path, **{words: given[words]})
    assert time.process_time() - start < 10 * match_clock.MATCHING_SECONDS
    assert caught.value.rule == f"{pattern} must be matched in a moment"
    assert "more than 0.3 s" in str(caught.value)


def test_every_tensor_has_one_fate(tmp_path):
    plan = plan_of(tmp_path)
    consumed = Counter[str]()
    for tensor in plan.tensors:
        consumed.update(tensor.inputs)
    assert set(consumed) == set(plan.source.entries) and set(consumed.values()) == {1}
    assert all(tensor.reason for tensor in plan.tensors)


@cases
def test_what_config_promises_must_be_there_and_what_is_there_promised(
    model, lost, config, says, tmp_path
):
    with pytest.raises(CheckpointError, match=re.escape(says)):
        plan_of(tmp_path, model, tensors=without(model, lost), config=config)


def test_a_tensor_outside_the_table_is_refused_or_kept_by_the_recipe(tmp_path):
    _, tensors = source_layout("glm-4.7")
    strange = tensors | {"model.layers.0.self_attn.gizmo.weight": ("BF16", (8, 8))}
    with pytest.raises(CheckpointError, match=r"got model\.layers\.0\.self_attn\.gizmo\.weight"):
        plan_of(tmp_path / "refused", tensors=strange)
    plan = plan_of(tmp_path / "kept", tensors=strange, keep=[r"re:.*\.gizmo\.weight"])
    kept = tensor_of(plan, "model.layers.0.self_attn.gizmo")
    assert kept.fate == "keep" and kept.outputs[0].dtype == "BF16"


GROUPS = ("attention", "dense_mlp", "shared_experts", "experts")
PLAIN = dict.fromkeys(GROUPS, "bf16")


@pytest.mark.parametrize(
    ("modules", "scheme", "says"),
    [
        (
            "model.layers.1.self_attn.k_proj",
            "FP8_DYNAMIC",
            "fuses model\\.layers\\.1\\.self_attn\\.\\w_proj and .*qkv_proj.*one scheme",
        ),
        (
            "re:.*\\.eh_proj",
            "W4A16",
            "model\\.layers\\.3\\.eh_proj is never quantized .*nn\\.Linear.*got W4A16",
        ),
        (
            "re:.*\\.down_proj",
            "W4A16",
            "W4A16 needs K divisible by 128; got K=96 in .*\\.down_proj\\.weight",
        ),
        (
            "re:.*\\.up_proj",
            "W4A16_ASYM",
            "W4A16_ASYM needs N divisible by 8.*got N=100 in model.layers.0.mlp.(gate|up)_proj",
        ),
        (
            "re:model.layers.0.mlp.(gate|up)_proj",
            "FP8_BLOCK",
            "needs N divisible by 128 where modules are fused; got N=100",
        ),
    ],
)
def test_an_override_that_vllm_cannot_load_is_refused(modules, scheme, says, tmp_path):
    override = {"modules": modules, "scheme": scheme}
    sizes = {"down_proj": ("BF16", (256, 96)), "up_proj": ("BF16", (100, 256))}
    sizes["gate_proj"] = sizes["up_proj"]
    tensors = source_layout("glm-4.7")[1]
    tensors |= {f"model.layers.0.mlp.{name}.weight": spec for name, spec in sizes.items()}
    with pytest.raises(RecipeError, match=says):
        plan_of(tmp_path, tensors=tensors, overrides=[override], backbone=PLAIN)


def calibrated_plan(folder, model="glm-4.7", *, algorithm="minmax", **changes):
    calibration = find_recipe("glm-4.7.nvfp4-fp8")[0].calibration
    assert calibration is not None
    return plan_of(
        folder, model, calibration=calibration.model_dump() | {"algorithm": algorithm}, **changes
    )


def test_a_plan_says_what_batches_contribute(tmp_path):
    """Static scales beside weights from the source; or whole modules; or nothing."""
    words = dict(zip(GROUPS, ("FP8", "FP8_DYNAMIC", "W4A16", "NVFP4"), strict=True))
    scales = "input scales from calibration data"
    gptq = "gptq on calibration data"
    of_fp8 = ("attention", "scales", 1, scales)
    plain = ("dense_mlp", "", 0, "")
    for algorithm, needed, experts, shared in (
        ("minmax", "FP8 NVFP4", ("scales", 1, scales), ("", 0, "")),
        ("gptq", "FP8 NVFP4 W4A16", ("weights", 4, gptq), ("weights", 3, gptq)),
    ):
        plan = calibrated_plan(tmp_path, algorithm=algorithm, backbone=words)
        found = set()
        for t in plan.tensors:
            if t.fate == "quantize":
                said = t.reason.partition("; ")[2]
                found.add((t.role, t.calibrated, len(t.calibrated_outputs), said))
        assert found == {of_fp8, plain, ("experts", *experts), ("shared_experts", *shared)}
        assert plan.needs_calibration == needed.split()
        assert not any(tensor.may_change for tensor in plan.tensors)
    assert plan_of(tmp_path).needs_calibration == []


def test_what_awq_may_rescale(tmp_path):
    """All else in a layer whose weights it rewrites; nothing of the MTP block that is left alone,
    no embedding.
    """
    backbone = dict.fromkeys(GROUPS, "FP8_DYNAMIC") | {"experts": "W4A16"}
    plan = calibrated_plan(tmp_path, algorithm="awq", backbone=backbone)
    free = [tensor for tensor in plan.tensors if tensor.may_change]
    roles = ("norm", "router", "attention", "shared_experts")
    places = {(tensor.part, tensor.layer, tensor.role) for tensor in free}
    assert places == {*product(["backbone"], [1, 2], roles)}
    assert {tensor.calibrated for tensor in free} == {""}
    norm = tensor_of(plan, "model.layers.1.post_attention_layernorm")
    assert norm.reason.endswith("; awq may rescale it")


@pytest.mark.parametrize(("scheme", "mtp"), [("NVFP4", "bf16"), ("FP8", "bf16"), ("bf16", "NVFP4")])
def test_static_scales_where_vllm_absorbs_the_weight(scheme, mtp, tmp_path):
    """kv_b_proj is read through an identity matrix, which no batch looked like; scales made on the
    fly take it.
    """
    layer = 0
    distorted = scheme
    if scheme == "bf16":  # the MTP block's
        layer = 3
        distorted = mtp
    module = rf"model\.layers\.{layer}\.self_attn\.kv_b_proj"
    backbone = PLAIN | {"attention": scheme}
    wanted = {"backbone": backbone, "mtp": mtp}
    says = (
        rf"identity matrix, which static input scales distort; got {distorted} "
        rf"for {module}\.weight"
    )
    with pytest.raises(RecipeError, match=says + r"\. Add an override for `re:\.\*\\\.kv_b_proj`"):
        calibrated_plan(tmp_path, "deepseek-r1", **wanted)
    overrides = [{"modules": r"re:.*\.kv_b_proj", "scheme": "FP8_BLOCK"}]
    plan = calibrated_plan(tmp_path, "deepseek-r1", **wanted, overrides=overrides)
    assert {t.scheme for t in plan.tensors if t.module.endswith("kv_b_proj")} == {"FP8_BLOCK"}
    for dynamic in ("FP8_DYNAMIC", "FP8_BLOCK", "MXFP4", "W8A8", "NVFP4A16"):
        plan_of(tmp_path, "deepseek-r1", backbone=backbone | {"attention": dynamic}, mtp="bf16")


def test_mtp_from_a_file_that_the_index_forgot(tmp_path):
    """A separate mtp.safetensors is taken in, and the output's index lists what it held."""
    config, tensors = source_layout("glm-4.7")
    rest = without("glm-4.7", r"model\.layers\.3\.")
    mtp = {name: spec for name, spec in tensors.items() if name not in rest}
    folder = write_checkpoint(tmp_path / "source", config, rest)
    write_shard(folder / "mtp.safetensors", mtp)
    plan = make_plan(find_recipe("glm-4.7")[0], open_source(folder))
    assert {*chain(*(tensor.inputs for tensor in plan.mtp))} == set(mtp)


def test_source_policy_keeps_native_bytes(tmp_path):
    """DeepSeek-V4's MTP block as released: FP8 blocks and MXFP4 experts under compressed-tensors'
    names.
    """
    plan = plan_of(tmp_path, "dsv4-flash", mtp="source")
    kept = {}
    for tensor in plan.mtp:
        if tensor.form != "plain":
            kept[tensor.role] = f"{tensor.form} {tensor.fate} {tensor.scheme}"
    blocks = dict.fromkeys(("attention", "shared_experts", "glue"), "fp8_block keep FP8_BLOCK")
    assert kept == blocks | {"experts": "mxfp4 keep MXFP4A8"}


def test_float_scales_keep_their_precision(tmp_path):
    """FP8 with float32 scales a row stays FP8 with float32 scales a row: rounding them to BF16
    would change values.
    """
    _, tensors = source_layout("glm-4.7")
    name = "model.layers.3.self_attn.o_proj.weight"
    (rows, columns) = tensors[name][1]
    stored = {name: ("F8_E4M3", (rows, columns)), f"{name}_scale": ("F32", (rows, 1))}
    plan = plan_of(tmp_path, tensors=tensors | stored, mtp="source")
    outputs = tensor_of(plan, name.removesuffix(".weight")).outputs
    dtypes = {output.name: output.dtype for output in outputs}
    assert dtypes == {name: "F8_E4M3", f"{name}_scale": "F32"}


def test_the_same_codes_without_an_input_scale_are_not_yet_the_scheme(tmp_path):
    """NVFP4A16 in the source is no NVFP4: what is kept would lack the scale of its inputs."""
    _, tensors = source_layout("glm-4.7")
    overrides = []
    for layer, scheme in enumerate(("NVFP4A16", "NVFP4")):
        module = f"model.layers.{layer}.self_attn.o_proj"
        rows, columns = tensors.pop(f"{module}.weight")[1]
        tensors |= {
            f"{module}.weight_packed": ("U8", (rows, columns // 2)),
            f"{module}.weight_scale": ("F8_E4M3", (rows, columns // 16)),
            f"{module}.weight_global_scale": ("F32", (1,)),
        }
        overrides.append({"modules": module, "scheme": scheme})
    plan = calibrated_plan(tmp_path, tensors=tensors, overrides=overrides, backbone=PLAIN)
    fates = {tensor.scheme: tensor.fate for tensor in plan.tensors if tensor.scheme}
    assert fates == {"NVFP4A16": "keep", "NVFP4": "quantize"}


def test_stored_forms_that_cannot_be_read_are_refused(tmp_path):
    """Integers with zero points in other words would be read wrongly, not loudly, if they were
    taken for symmetric.
    """
    _, tensors = source_layout("glm-4.7")
    module = "model.layers.0.self_attn.o_proj"
    rows, columns = tensors.pop(f"{module}.weight")[1]
    tensors |= {
        f"{module}.weight_packed": ("I32", (rows, columns // 8)),
        f"{module}.weight_shape": ("I64", (2,)),
        f"{module}.weight_scale": ("BF16", (rows, columns // 128)),
        f"{module}.weight_zero_point": ("I32", (rows // 8, columns // 128)),
    }
    kept = plan_of(tmp_path, tensors=tensors, requantize=True)
    weight = tensor_of(kept, module)
    assert weight.form == "int_packed" and len(weight.inputs) == 4
    tensors[f"{module}.weight_zero_point"] = ("I32", (rows // 4, columns // 128))
    with pytest.raises(CheckpointError, match=r"o_proj\.weight: must be plain.*weight_zero_point"):
        plan_of(tmp_path, tensors=tensors)


def test_what_a_tool_has_rounded_is_rounded_again_only_where_that_is_asked_for(tmp_path):
    """In another scheme: the release behind it is named. FP8 that DeepSeek published is a release
    itself.
    """
    module = "model.layers.0.self_attn.o_proj"
    tensors = dict(source_layout("glm-4.7")[1])
    rows, columns = tensors[f"{module}.weight"][1]
    tensors[f"{module}.weight"] = ("F8_E4M3", (rows, columns))
    tensors[f"{module}.weight_scale"] = ("F32", (rows, 1))
    config = {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}
    said = {"_name_or_path": "org/release", "quantization_config": config}

    def fate(config=said, scheme="W4A16", **changes) -> str:
        overrides = [{"modules": module, "scheme": scheme}]
        plan = plan_of(tmp_path, tensors=tensors, config=config, overrides=overrides, **changes)
        return tensor_of(plan, module).fate

    with pytest.raises(
        RecipeError, match=r"got FP8_DYNAMIC in .*o_proj\.weight, for W4A16"
    ) as caught:
        fate()
    assert caught.value.cure.startswith("Quantize org/release, or add --requantize")
    assert fate(requantize=True) == "quantize"
    assert fate(scheme="bf16") == "dequantize" and fate(scheme="FP8_DYNAMIC") == "keep"
    native = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    assert fate(config={"quantization_config": native}) == "quantize"
    # modelopt leaves the release's word, and adds its own.
    with pytest.raises(RecipeError, match="a weight is rounded once"):
        fate(config={"quantization_config": native | {"quant_algo": "FP8"}})
