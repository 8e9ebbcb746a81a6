import json
import re
import shutil
from dataclasses import replace

import pytest
import releases
import torch
from keepmtp.checkpoints.source import open_source
from keepmtp.pipeline import plan_for
from keepmtp.quantize.calibrate.layers.work import LayerWork
from keepmtp.quantize.calibrate.model.skeleton import Batch, Skeleton
from keepmtp.quantize.plan.plan import make_plan
from keepmtp.recipes.errors import CheckpointError, KeepMTPError, RecipeError
from keepmtp.recipes.find import shipped_recipes
from passes import as_calibrated
from releases import source_layout, write_checkpoint
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

CPU = torch.device("cpu")
IDS = torch.randint(3, 300, (2, 24), generator=torch.Generator().manual_seed(0))


RECIPES = {r.model: r for r in shipped_recipes() if not r.calibrated_schemes() and r.mtp != "auto"}


def logits(skeleton: Skeleton, ids: Tensor) -> Tensor:
    """Layer by layer, as calibration walks, without calibrating."""
    batch = Batch(ids=ids)
    with torch.no_grad():
        for index in range(len(skeleton)):
            with skeleton.layer(index) as layer:
                outputs = []
                handle = layer.register_forward_hook(
                    lambda _module, _args, output, to=outputs: to.append(output)
                )
                for arguments in skeleton.feed(index, [batch]):
                    skeleton.model(**arguments, use_cache=False)
                handle.remove()
            state = outputs[0] if isinstance(outputs[0], tuple) else (outputs[0],)
            batch = Batch(ids=ids, state=state)
        with skeleton.head():
            return next(
                skeleton.model(**arguments).logits
                for arguments in skeleton.feed(len(skeleton), [batch])
            )


@pytest.mark.parametrize("model", ["tiny-glm4-moe", "tiny-qwen3_5"])
def test_layer_by_layer_is_the_model(model):
    plan, _ = plan_for(model)
    whole = AutoModelForCausalLM.from_pretrained(
        plan.source.folder,
        dtype=torch.bfloat16,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    with torch.no_grad():
        expected = whole(input_ids=IDS, use_cache=False).logits
    found = logits(Skeleton(plan, device=CPU), IDS)
    # Experts stacked or one by one add up in another order, in BF16.
    torch.testing.assert_close(found.float(), expected.float(), atol=0.15, rtol=0.02)
    assert (found.argmax(-1) == expected.argmax(-1)).float().mean() > 0.97


# Families that transformers 5.17 cannot build, or whose layers it converts beyond what can be
# undone.
REFUSED = {
    "dots3-note-prev": "no class for model_type 'dots3_note'",
    "gemma-4-26b-assistant": "a draft alone",
    "inkling": "only concatenation can be undone",
    "ling-3.0-flash": "only Python of the checkpoint's own",
    "mimo-v2.5": "only Python of the checkpoint's own",
    "longcat-flash-chat": "must have a parameter for",
    "openpangu-ultra": "only Python of the checkpoint's own",
    "ring-2.5-1t": "only Python of the checkpoint's own",
    "step-3.5-flash": "no class for model_type 'step3p5'",
    "step-3.7-flash": "must have a parameter for",
}


# Its n-gram tables are sized by integers on disk, which random fixtures do not have.
ONLY_BOUND = ("qwen3.8-flash-next",)


@pytest.mark.few(10)
@pytest.mark.parametrize("model", sorted(releases.MODELS.keys() & RECIPES))
def test_every_family_computes_or_is_refused(model, tmp_path):
    recipe = RECIPES[model]
    write_checkpoint(tmp_path / "source", *source_layout(model, size="tiny"), data="random")
    plan = make_plan(recipe, open_source(tmp_path / "source"))
    if plan.view.family.no_backbone:
        with pytest.raises(RecipeError, match=re.escape(plan.view.family.no_backbone)):
            Skeleton(plan, device=CPU)
        # The reason is still true: without it, the class or its names do not fit.
        plan = replace(
            plan, view=replace(plan.view, family=replace(plan.view.family, no_backbone=""))
        )
    if model in REFUSED:
        with pytest.raises((RecipeError, CheckpointError), match=REFUSED[model]):
            skeleton = Skeleton(plan, device=CPU)
            for index in range(len(skeleton)):
                skeleton.bind_layer(index)
        return
    if model in ONLY_BOUND:
        skeleton = Skeleton(plan, device=CPU)
        assert all(skeleton.bind_layer(index) for index in range(len(skeleton)))
        return
    found = logits(Skeleton(plan, device=CPU), IDS)
    assert found.shape[:2] == IDS.shape
    assert found.isfinite().all()


def copy(tmp_path, edit):
    """The shipped GLM with its second shard changed."""
    folder = shutil.copytree("models/tiny-glm4-moe", tmp_path / "copy")
    for file in sorted(folder.glob("*.safetensors")):
        save_file(edit(load_file(file)), file)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"] = {
        name: file.name for file in sorted(folder.glob("*.safetensors")) for name in load_file(file)
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return plan_for("tiny-glm4-moe", source=str(folder))[0]


def test_a_parameter_without_a_tensor_is_named(tmp_path):
    plan = copy(
        tmp_path,
        lambda tensors: {k: v for k, v in tensors.items() if k != "model.layers.1.mlp.gate.weight"},
    )
    with pytest.raises(
        CheckpointError, match=r"must be on disk; got nothing for mlp\.gate\.weight"
    ):
        Skeleton(plan, device=CPU).bind_layer(1)


def test_a_tensor_without_a_parameter_is_named(tmp_path):
    bias = {"model.layers.0.mlp.up_proj.bias": torch.zeros(384, dtype=torch.bfloat16)}
    plan = copy(
        tmp_path,
        lambda tensors: tensors | (bias if "model.layers.0.mlp.up_proj.weight" in tensors else {}),
    )
    with pytest.raises(
        CheckpointError, match=r"must have a parameter for model\.layers\.0\.mlp\.up_proj\.bias"
    ):
        Skeleton(plan, device=CPU).bind_layer(0)


def test_a_wrong_width_is_named(tmp_path):
    def narrow(tensors):
        name = "model.layers.2.mlp.experts.3.down_proj.weight"
        return tensors | ({name: tensors[name][:128].contiguous()} if name in tensors else {})

    skeleton = Skeleton(copy(tmp_path, narrow), device=CPU)
    with (
        pytest.raises(
            CheckpointError, match=r"experts\.3\.down_proj\.weight must have shape \[256, 128\]"
        ),
        skeleton.layer(2),
    ):
        pass


def test_no_weight_of_another_layer_is_held():
    plan, _ = plan_for("tiny-glm4-moe")
    skeleton = Skeleton(plan, device=CPU)
    with skeleton.layer(1):
        real = {name for name, value in skeleton.model.named_parameters() if not value.is_meta}
        assert {name.split(".")[2] for name in real if ".layers." in name} == {"1"}
    assert not any(
        ".layers." in name for name, value in skeleton.model.named_parameters() if not value.is_meta
    )


def test_modules_that_run_fused_share_scales():
    plan, _ = plan_for("tiny-glm4-moe", scheme="NVFP4A16")
    skeleton = Skeleton(plan, device=CPU)
    work = LayerWork.of(as_calibrated(plan), skeleton.bind_layer(1), "L.")
    fused = [tuple(sorted(group)) for group in work.fused]
    assert ("L.self_attn.k_proj", "L.self_attn.q_proj", "L.self_attn.v_proj") in fused
    assert ("L.mlp.experts.2.gate_proj", "L.mlp.experts.2.up_proj") in fused
    assert work.schemes["L.mlp.experts.0.down_proj"] == "NVFP4A16"
    assert "L.mlp.gate" not in work.schemes


def test_an_unknown_architecture_is_offered_the_data_free_recipe(tmp_path):
    write_checkpoint(tmp_path / "source", *source_layout("dots3-note-prev", size="tiny"))
    plan = make_plan(RECIPES["dots3-note-prev"], open_source(tmp_path / "source"))
    with pytest.raises(KeepMTPError, match="Use a data-free scheme"):
        Skeleton(plan, device=CPU)


def test_stacked_experts_that_stay_plain_are_filled(tmp_path):
    write_checkpoint(
        tmp_path / "source", *source_layout("qwen3.5-397b", size="tiny"), data="random"
    )
    recipe = RECIPES["qwen3.5-397b"]
    plain = recipe.model_copy(update={"backbone": recipe.backbone | {"experts": "bf16"}})
    packed, kept = (make_plan(each, open_source(tmp_path / "source")) for each in (recipe, plain))
    torch.testing.assert_close(
        *(logits(Skeleton(plan, device=CPU), IDS) for plan in (packed, kept))
    )
