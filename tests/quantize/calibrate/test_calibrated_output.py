"""What the writer makes of statistics: llm-compressor's own bytes, checked clean, and nothing half
calibrated.
"""

import re
import sys
from pathlib import Path

import pytest
import torch
from calibrated import made_up, planned, saved
from checked import check
from commands import GLM, captured
from data_files import json_of
from keepmtp.checkpoints.files import WORK
from keepmtp.checkpoints.source import open_source
from keepmtp.quantize.pack.pack import pack
from keepmtp.quantize.plan.plan import make_plan
from keepmtp.quantize.write.output import claim, refuse_output
from keepmtp.recipes.errors import CheckpointError, RecipeError
from keepmtp.recipes.family import HFName
from keepmtp.recipes.find import find_recipe
from keepmtp.recipes.schemes import SCHEMES
from writing import weights_of, written

BIN = Path(sys.executable).parent

# A process of its own: llm-compressor's loader changes transformers' global registry of checkpoint
# conversions.
ONESHOT = """
import sys, torch, transformers.monkey_patching as patching
from llmcompressor import oneshot
from llmcompressor.modeling.moe.linearize import load_quantizable_moe
from llmcompressor.modifiers.quantization import QuantizationModifier
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

def names_or_nothing(module):
    try:
        return dir(module)
    except ModuleNotFoundError:
        return []

class Processor:
    def save_pretrained(self, *args, **kwargs):
        pass

patching.dir = names_or_nothing  # transformers 5.17 calls dir() there on modules that need torchvision
source, out, *schemes = sys.argv[1:]
torch.manual_seed(0)
batches = [{"input_ids": torch.randint(3, 500, (1, 64))} for _ in range(4)]
for scheme in schemes:
    with load_quantizable_moe():
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    recipe = QuantizationModifier(targets="Linear", scheme=scheme, ignore=["lm_head", "re:.*mlp.gate$"])
    oneshot(model=model, dataset=DataLoader(batches, batch_size=None), recipe=recipe, processor=Processor())
    model.save_pretrained(f"{out}/{scheme}", save_compressed=True)
"""


@pytest.fixture(scope="module")
def oneshots(tmp_path_factory) -> Path:
    """tiny-glm4-moe calibrated and saved by llm-compressor alone, with its own presets: a folder a
    scheme.
    """
    folder = tmp_path_factory.mktemp("oneshot")
    command = [sys.executable, "-c", ONESHOT, str(GLM), str(folder), "NVFP4", "FP8"]
    captured(command, cwd=folder, status=0)
    return folder


def assert_same(ours: torch.Tensor, theirs: torch.Tensor, where: str) -> None:
    assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), where
    assert torch.equal(ours.reshape(-1).view(torch.uint8), theirs.reshape(-1).view(torch.uint8)), (
        where
    )


@pytest.mark.parametrize("scheme", ["NVFP4", "FP8"])
def test_same_bytes_as_oneshot(scheme, oneshots, tmp_path):
    """Given llm-compressor's input scales, every tensor of the backbone is the one it saves.

    But for static FP8 where vLLM fuses: the weights there have the largest scale of the group.
    """
    theirs = weights_of(oneshots / scheme)
    plan = planned(GLM, model="tiny-glm4-moe", rest=scheme)
    released = weights_of(GLM)
    scales = {}
    for name, value in theirs.items():
        if name.endswith(("input_scale", "input_global_scale")):
            scales[HFName(name)] = value
    assert len(scales) > 30 and len({float(value) for value in scales.values()}) > 5
    ours = written(plan, tmp_path / "out", statistics=saved(tmp_path / "statistics", scales))
    mtp = {o.name for tensor in plan.tensors if tensor.part == "mtp" for o in tensor.outputs}
    assert len(mtp) > 10
    assert set(ours) - mtp == set(theirs)
    units = [unit for unit in plan.units if len(unit) > 1]
    fused = {output.name: unit for unit in units for t in unit for output in t.outputs}
    for name, value in theirs.items():
        if scheme != "FP8" or name not in fused or name.endswith("input_scale"):
            assert_same(ours[name], value, name)
        elif name.endswith("weight_scale"):
            largest = max(theirs[f"{tensor.module}.weight_scale"] for tensor in fused[name])
            assert ours[name] == largest
        else:
            weight = released[name] / ours[f"{name}_scale"]
            assert_same(ours[name], weight.to(torch.float8_e4m3fn), name)
    assert check(tmp_path / "out", source=open_source(GLM)).findings == ()


@pytest.mark.parametrize(
    "rest, mtp, algorithm",
    [
        ("NVFP4", "NVFP4", "minmax"),
        ("FP8", "FP8", "minmax"),
        ("NVFP4", "W4A16", "gptq"),
        ("W4A16", "bf16", "awq"),
        ("W8A8", "W8A8", "smoothquant"),
    ],
)
def test_made_up_statistics_pass_the_check_and_are_copied(rest, mtp, algorithm, tmp_path):
    plan = planned(GLM, model="tiny-glm4-moe", rest=rest, mtp=mtp, algorithm=algorithm)
    assert_copied(plan, tmp_path)
    assert check(tmp_path / "out", source=open_source(GLM)).findings == ()


def assert_copied(plan, folder: Path) -> None:
    made = made_up(plan)
    ours = written(plan, folder / "out", statistics=saved(folder / "statistics", made))
    for name, value in made.items():
        assert_same(ours[name], value, name)


def test_rewritten_stacked_experts_are_copied(tmp_path):
    words = {"rest": "bf16", "experts": "NVFP4", "algorithm": "gptq"}
    plan = planned(tmp_path / "source", model="step-3.5-flash", data="random", **words)
    assert any("experts.3.down_proj.weight_packed" in name for name in made_up(plan))
    assert_copied(plan, tmp_path)


def test_one_scale_less_is_refused_before_a_byte(tmp_path):
    plan = planned(GLM, model="tiny-glm4-moe")
    made = made_up(plan)
    name = "model.layers.2.mlp.experts.3.up_proj.input_global_scale"
    del made[HFName(name)]
    given = saved(tmp_path / "statistics", made)
    for statistics, says in (
        (given, f"calibration must give {re.escape(name)}; got no such tensor"),
        (None, "must be calibrated before it is written"),
    ):
        with pytest.raises((CheckpointError, RecipeError), match=says):
            written(plan, tmp_path / "out", statistics=statistics)
    assert [path.name for path in (tmp_path / "out.partial").iterdir()] == [WORK]


def test_stacked_experts_take_their_scales_one_by_one(tmp_path):
    """Step-3.5 stacks gate, up and down apart: each expert has scales of its own, and its gate and
    up are packed together, since vLLM fuses them under one scale.
    """
    words = {"rest": "bf16", "experts": "NVFP4"}
    plan = planned(tmp_path / "source", model="step-3.5-flash", data="random", **words)
    made = {}
    for name in made_up(plan):
        made[name] = torch.tensor([100.0 + int(re.findall(r"experts\.(\d+)", name)[0])])
    ours = written(plan, tmp_path / "out", statistics=saved(tmp_path / "statistics", made))
    source = weights_of(tmp_path / "source")
    names = ("gate", "up", "down")
    for expert in range(4):
        gate, up, down = (source[f"model.layers.2.moe.{n}_proj.weight"][expert] for n in names)
        packed = pack(SCHEMES["NVFP4"], [gate, up]) + pack(SCHEMES["NVFP4"], [down])
        for name, parts in zip(names, packed, strict=True):
            stem = f"model.layers.2.moe.experts.{expert}.{name}_proj"
            for leaf, value in parts.items():
                assert_same(ours[f"{stem}.{leaf}"], value, f"{stem}.{leaf}")
            assert ours[f"{stem}.input_global_scale"].item() == 100 + expert
    assert not any(re.search(r"\.moe\.(gate|up|down)_proj\.", name) for name in ours)


def test_mxfp4_becomes_nvfp4_without_rounding_and_with_its_scales(tmp_path):
    """DeepSeek-V4's experts keep their codes; the weights' tensors are those of the data-free
    run.
    """
    words = {"model": "dsv4-flash", "data": "random", "rest": "FP8_BLOCK"}
    plan = planned(tmp_path / "source", **words, experts="NVFP4")
    statistics = saved(tmp_path / "statistics", made_up(plan))
    ours = written(plan, tmp_path / "out", statistics=statistics)
    # What the same recipe writes data-free; the calibration block serves one expert only.
    words = {"backbone": plan.recipe.backbone | {"experts": "NVFP4A16"}}
    recipe = plan.recipe.model_copy(update=words)
    theirs = written(make_plan(recipe, plan.source), tmp_path / "data-free")
    assert set(ours) - set(theirs) == set(made_up(plan)) != set()
    for name, value in theirs.items():
        assert_same(ours[name], value, name)


def test_what_awq_rescaled_is_taken_and_all_else_packed_from_the_source(tmp_path):
    words = {"rest": "FP8_DYNAMIC", "experts": "W4A16", "algorithm": "awq"}
    plan = planned(GLM, model="tiny-glm4-moe", **words)
    made = made_up(plan)
    plain = written(plan, tmp_path / "plain", statistics=saved(tmp_path / "without", made))
    norm = "model.layers.1.post_attention_layernorm.weight"
    value_proj = "model.layers.1.self_attn.v_proj"
    made[HFName(norm)] = 2 * plain[norm]
    (packed,) = pack(SCHEMES["FP8_DYNAMIC"], [torch.ones(128, 256).bfloat16()])
    made |= {HFName(f"{value_proj}.{leaf}"): value for leaf, value in packed.items()}
    rescaled = written(plan, tmp_path / "rescaled", statistics=saved(tmp_path / "with", made))
    changed = {name for name, value in plain.items() if not torch.equal(value, rescaled[name])}
    assert changed == {norm, f"{value_proj}.weight", f"{value_proj}.weight_scale"}
    for name in changed:
        assert_same(rescaled[name], made[HFName(name)], name)


def test_batches_count_where_something_is_calibrated(tmp_path):
    """Others do not resume, and the provenance tells of them."""
    plan = planned(GLM, model="tiny-glm4-moe")
    out = tmp_path / "out"
    with claim(plan, out, calibration="these ids"):
        pass
    refuse_output(plan, out, calibration="these ids")
    for other in ("those ids", ""):
        with pytest.raises(RecipeError, match="with the same recipe, source, calibration data"):
            refuse_output(plan, out, calibration=other)
    told = {"dataset": "d", "ids_sha256": "abc"}
    given = saved(tmp_path / "s", made_up(plan))
    written(plan, tmp_path / "made", statistics=given, calibration=told)
    provenance = json_of(tmp_path / "made/keepmtp.json")
    libraries = {"llmcompressor", "compressed-tensors", "transformers", "torch"}
    assert provenance["calibration"] == told and libraries <= provenance["versions"].keys()
    plan = make_plan(find_recipe("tiny-glm4-moe", scheme="FP8_DYNAMIC")[0], open_source(GLM))
    with claim(plan, tmp_path / "free", calibration="these ids"):
        pass
    written(plan, tmp_path / "free")
    provenance = json_of(tmp_path / "free/keepmtp.json")
    assert "calibration" not in provenance and "llmcompressor" not in provenance["versions"]
