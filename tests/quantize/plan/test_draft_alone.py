"""A draft of its own: which tensors it has, in whose dialect, and what is refused before a byte is
written.
"""

from dataclasses import replace

import pytest
import torch
from checked import check
from checkpoint_files import write, write_single
from commands import GLM, ran
from data_files import json_of
from good import ours, released
from hub import serving
from keepmtp.checkpoints.source import open_source
from keepmtp.pipeline import plan_for, quantize
from keepmtp.quantize.plan.configs import files_of
from keepmtp.quantize.plan.draft_alone import draft_as_written
from keepmtp.quantize.plan.plan import make_plan
from keepmtp.recipes.errors import GateError, RecipeError
from keepmtp.recipes.schema import validated
from safetensors.torch import load_file, save_file
from written_values import tensors_of


def names_of(plan) -> list[str]:
    return sorted(output.name for shard in plan.shards for output in shard.outputs)


@pytest.mark.parametrize("format", ["compressed-tensors", "modelopt"])
@pytest.mark.parametrize("model", ["glm-4.7", "mimo-7b"])
def test_the_block_alone(model, format, tmp_path):
    """The tensors that a whole output has for the block, and one embedding."""
    release = write(tmp_path / "release", released(model))
    target = ours(model, "NVFP4A16", "NVFP4A16", format=format)
    place = write(tmp_path / "target", target)
    plan, text = plan_for(str(release), draft_for=str(place), mtp="NVFP4A16")
    assert plan.is_draft_alone and plan.recipe.format == format and "backbone: {}" in text
    view = plan.view
    block = [name for name in target.tensors if view.is_mtp(name)]
    others = [name for name in names_of(plan) if name not in block]
    assert {*block} <= {*names_of(plan)} and others in ([], ["model.embed_tokens.weight"])
    roles = [tensor.role for tensor in plan.tensors if tensor.role == "embedding"]
    assert len(roles) == 1 and len(plan.source.entries) < len(released(model).tensors)
    # Its recipe makes the same plan, without a word about the target.
    again = make_plan(validated(plan.recipe.model_dump(), "again"), open_source(str(release)))
    assert names_of(again) == names_of(plan)


def test_a_recipe_of_the_block_alone_needs_a_target(tmp_path):
    """Not a backbone that was left out of a recipe in silence."""
    plan, text = plan_for(str(GLM), draft_for=str(GLM), mtp="bf16")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(text)
    with pytest.raises(RecipeError, match="Add --draft-for TARGET"):
        plan_for(str(recipe))
    again, _ = plan_for(str(recipe), source=str(GLM), draft_for=str(GLM))
    assert names_of(again) == names_of(plan)


def test_of_a_finished_checkpoint(tmp_path):
    """A packed block keeps its bytes; a shard that holds the backbone too is no link."""
    target = write_single(tmp_path / "target", ours("mimo-7b", "FP8_DYNAMIC", "FP8_DYNAMIC"))
    plan, _ = plan_for(str(target), draft_for=str(target))
    assert all(plan.stays(tensor) for tensor in plan.tensors)
    assert not any(shard.is_link for shard in plan.shards)
    assert len(names_of(plan)) < len(open_source(target).entries) / 2


def test_as_written(tmp_path):
    release = str(write(tmp_path / "release", released("glm-4.7")))
    plan, _ = plan_for(release, draft_for=release, mtp="bf16")
    source = draft_as_written(plan)
    assert sorted(source.entries) == names_of(plan)
    assert source.config["num_hidden_layers"] == 3, "the block's number in the names"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({"mtp": "NVFP4"}, "Use NVFP4A16"),
        ({"mtp": "auto"}, "has no backbone that could give it batches; got auto"),
        ({"mtp": "tuned"}, "mtp_tuned must be given"),
        ({"changes": ["attention=bf16"]}, "by --mtp; got --set attention=bf16"),
        ({"scheme": "FP8_DYNAMIC"}, "by --mtp; got --scheme FP8_DYNAMIC. Write --mtp FP8_DYNAMIC"),
        ({"calibration": "mix-512x2048"}, "reads no text; got --calibration mix-512x2048"),
    ],
)
def test_bad_words(words, says, tmp_path):
    release = str(write(tmp_path / "release", released("glm-4.7")))
    with pytest.raises(RecipeError) as caught:
        plan_for(release, draft_for=release, **words)
    assert says in str(caught.value)


def test_another_form_than_the_target_builds(tmp_path):
    """The target's quantization config decides; the sentence names tensor and word."""
    release = str(write(tmp_path / "release", released("glm-4.7")))
    target = write(tmp_path / "target", ours("glm-4.7", "FP8_DYNAMIC", "FP8_DYNAMIC"))
    with pytest.raises(GateError, match=r"model\.layers\.3\..* plain .*: --mtp FP8_DYNAMIC"):
        plan_for(release, draft_for=str(target), mtp="bf16")
    plan, _ = plan_for(release, draft_for=str(target), mtp="FP8_DYNAMIC")
    assert replace(plan, target=None).is_draft_alone


@pytest.mark.parametrize("model", ["deepseek-v3.1", "mimo-v2-flash"])
def test_for_a_target_in_native_blocks(model, tmp_path):
    """The release's own tensors, byte for byte; and another release's, under the same names."""
    release = write(tmp_path / "release", released(model))
    for shard in release.glob("*.safetensors"):
        numbers = {}
        for name, tensor in load_file(shard).items():
            values = torch.rand(tensor.shape, generator=torch.Generator().manual_seed(len(numbers)))
            numbers[name] = (values + 0.1).to(tensor.dtype)
        save_file(numbers, shard)
    plan, text = plan_for(str(release), draft_for=str(release), mtp="source")
    assert plan.recipe.format == "fp8" and "format: fp8" in text
    said = ran(f"quantize {release} --draft-for {release} --mtp source --out {tmp_path}/draft")
    assert f"keepmtp serve {release} --draft {tmp_path}/draft" in said
    said = ran(f"plan {release} --draft-for {release}")
    assert "scales renamed" not in said, said
    config = json_of(tmp_path / "draft" / "config.json")["quantization_config"]
    assert any(name.startswith("model.") for name in config["modules_to_not_convert"]), config
    before, after = tensors_of(release), tensors_of(tmp_path / "draft")
    assert {name: before[name] for name in after} == after
    assert any(name.endswith(".weight_scale_inv") for name in after)
    recipe = str(tmp_path / "draft" / "recipe.yaml")
    again, _ = plan_for(recipe, source=str(release), draft_for=str(release))
    assert files_of(again) == files_of(plan) and names_of(again) == names_of(plan)
    plain = released(model)
    plain.config.pop("quantization_config")
    plain.take(r".*_scale_inv")
    for name, (dtype, shape) in plain.tensors.items():
        if dtype == "F8_E4M3":
            plain.tensors[name] = ("BF16", shape)
    other = write(tmp_path / "other", plain)
    made, _ = plan_for(str(other), draft_for=str(release), mtp="FP8_BLOCK")
    assert names_of(made) == names_of(plan)
    with pytest.raises(GateError, match=r"plain BF16, but vLLM builds .* --mtp FP8_BLOCK\."):
        plan_for(str(other), draft_for=str(release), mtp="bf16")


def test_native_blocks_are_for_a_draft_alone():
    recipe = plan_for(str(GLM), scheme="FP8_DYNAMIC")[0].recipe
    with pytest.raises(RecipeError, match="format: fp8 is for a draft alone"):
        validated(recipe.model_dump() | {"format": "fp8"}, "here")


def test_of_a_repository_only_the_blocks_files_are_downloaded(serve_hub, tmp_path, monkeypatch):
    """And the output has the bytes of one that is made from the folder, also when repeated."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    requests = serve_hub(GLM)
    bytes_of = []
    for number, model in enumerate(("org/model", str(GLM))):
        plan, text = plan_for(model, draft_for=str(GLM), mtp="bf16")
        out = tmp_path / f"draft{number}"
        for was_there in (False, True):
            assert quantize(plan, text, out=out).was_there == was_there
        bytes_of.append((out / plan.shards[0].file).read_bytes())
        assert check(out).findings[0].rule == "draft-alone"
    assert bytes_of[0] == bytes_of[1]
    whole = [line.split()[1] for line in requests if "bytes=0-" not in line]
    shards = {line.rpartition("/")[2] for line in whole if line.endswith(".safetensors")}
    assert shards == {"model-00002-of-00002.safetensors"}


def test_of_a_repository_with_the_block_of_another(tmp_path, monkeypatch, hub_at):
    """The files of a donor are not asked of the repository."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    with serving(tmp_path / "hub") as hub:
        hub.mirror("org/model", GLM)
        hub_at(hub.endpoint)
        plan, text = plan_for("org/model", draft_for=str(GLM), mtp=f"from:{GLM}")
        quantize(plan, text, out=tmp_path / "draft")
    wanted, text = plan_for(str(GLM), draft_for=str(GLM))
    quantize(wanted, text, out=tmp_path / "wanted")
    assert tensors_of(tmp_path / "draft") == tensors_of(tmp_path / "wanted")
