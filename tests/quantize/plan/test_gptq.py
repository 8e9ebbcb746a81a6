"""Integers of GPTQ, AutoRound and AWQ as a source: their codes and scales are those of a scheme."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from checked import check
from commands import GLM
from data_files import json_of, put_json
from foreign_form import SAID
from keepmtp.checkpoints.source import INDEX
from keepmtp.pipeline import plan_for, quantize
from keepmtp.recipes.errors import CheckpointError, RecipeError
from safetensors.torch import load_file, save_file
from written_values import tensors_of

LEFT = r"model\.layers\.3\."
TOOLS = {
    "gptq": SAID["gptq"] | {"dynamic": {f"-:^{LEFT}": {}}},
    "auto-round": SAID["auto-round"] | {"extra_config": {f"^{LEFT}.*": {"bits": 16}}},
    "awq": SAID["awq"] | {"modules_to_not_convert": ["model.layers.3."]},
}
# Their own configs have no word for other forms.
WHOLE = "format=compressed-tensors"
SCHEMES = {"gptq": "W4A16", "auto-round": "W4A16", "awq": "W4A16_ASYM"}


def packed_by_awq(codes: np.ndarray) -> torch.Tensor:
    """As AutoAWQ packs eight columns into a word: [R, C] -> [R, C / 8]."""
    words = np.zeros((codes.shape[0], codes.shape[1] // 8), np.uint32)
    for place, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
        words |= codes[:, column::8] << np.uint32(4 * place)
    return torch.from_numpy(words.view(np.int32).copy())


def codes_in(words: torch.Tensor) -> np.ndarray:
    """Of compressed-tensors, the first in the low bits: [R, C] -> [R, 8 * C]."""
    places = words.numpy().view(np.uint32)[..., None] >> np.arange(0, 32, 4, dtype=np.uint32)
    return (places & np.uint32(15)).reshape(len(words), -1)


def written_by(tool: str, tensors: dict[str, torch.Tensor], module: str) -> dict[str, torch.Tensor]:
    """A module's tensors; those of compressed-tensors are taken out."""
    words = tensors.pop(f"{module}.weight_packed")
    rows, columns = tensors.pop(f"{module}.weight_shape").tolist()
    made = {"scales": tensors.pop(f"{module}.weight_scale").T.contiguous().half()}
    if tool == "awq":
        zeros = codes_in(tensors.pop(f"{module}.weight_zero_point").T.contiguous())
        return made | {
            "qweight": packed_by_awq(codes_in(words).T.copy()),
            "qzeros": packed_by_awq(zeros),
        }
    groups = torch.arange(columns, dtype=torch.int32) // 128
    zeros = torch.full((columns // 128, rows // 8), 0x77777777, dtype=torch.int32)
    return made | {"qweight": words.T.contiguous(), "qzeros": zeros, "g_idx": groups}


@pytest.fixture(scope="module", params=TOOLS)
def tool(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def ours(tool, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("ours") / tool
    quantize(*plan_for(str(GLM), scheme=SCHEMES[tool], mtp="bf16"), out=out)
    return out


@pytest.fixture(scope="module")
def theirs(tool, ours, tmp_path_factory) -> Path:
    """The same codes as the tool writes them."""
    out = tmp_path_factory.mktemp("theirs") / tool
    shutil.copytree(ours, out)
    files = {}
    for path in sorted(out.glob("*.safetensors")):
        tensors = load_file(path)
        for name in [name for name in tensors if name.endswith(".weight_packed")]:
            module = name.removesuffix(".weight_packed")
            for leaf, tensor in written_by(tool, tensors, module).items():
                tensors[f"{module}.{leaf}"] = tensor
        path.unlink()
        save_file(tensors, path)
        files |= dict.fromkeys(tensors, path.name)
    put_json(out / INDEX, {"metadata": {}, "weight_map": files})
    config = json_of(ours / "config.json") | {"quantization_config": TOOLS[tool]}
    put_json(out / "config.json", config)
    return out


def test_codes_and_scales_are_those_of_a_scheme(ours, theirs, tmp_path):
    assert check(theirs).findings == ()
    out = tmp_path / "out"
    quantize(*plan_for(str(theirs), changes=["mtp=FP8_DYNAMIC", WHOLE]), out=out)
    assert check(out).findings == ()
    wanted, found = tensors_of(ours), tensors_of(out)
    packed = [name for name in wanted if name.endswith(".weight_packed")]
    assert len(packed) > 30
    for name, tensor in wanted.items():
        if "layers.3." in name:
            continue
        if name.endswith(".weight_scale"):
            assert found[name][:2] == ("F16", tensor[1]), "as precise as it was"
        else:
            assert found[name] == tensor, name
    (shard,) = [path for path in out.glob("*.safetensors") if packed[0] in load_file(path)]
    scale = packed[0].replace("packed", "scale")
    assert torch.equal(load_file(shard)[scale].bfloat16(), load_file(ours / shard.name)[scale])


def test_they_are_rounded_again_only_if_asked_for(theirs, tmp_path):
    with pytest.raises(RecipeError, match=r"a weight is rounded once; got W4A16\w* in"):
        plan_for(str(theirs), changes=["experts=NVFP4A16", WHOLE])
    out = tmp_path / "out"
    quantize(*plan_for(str(theirs), changes=["experts=NVFP4A16", WHOLE], requantize=True), out=out)
    assert check(out).findings == ()


def test_what_the_config_does_not_say_of_them_is_refused(tool, theirs, tmp_path):
    others = {"bits": 8, "group_size": 64, "sym": False, "zero_point": False}
    shutil.copytree(theirs, tmp_path / "other")
    for key in others.keys() & TOOLS[tool].keys():
        config = json_of(theirs / "config.json")
        config["quantization_config"][key] = others[key]
        put_json(tmp_path / "other" / "config.json", config)
        with pytest.raises(CheckpointError, match=r"must be plain, .*; got qweight I32"):
            plan_for(str(tmp_path / "other"), changes=["mtp=FP8_DYNAMIC", WHOLE])
