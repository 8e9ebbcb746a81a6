import json
import re
import shutil
from contextlib import nullcontext
from dataclasses import replace

import pytest
import releases
import torch
from keepmtp.checkpoints.source import open_source
from keepmtp.pipeline import plan_for
from keepmtp.quantize.calibrate.layers.work import LayerWork
from keepmtp.quantize.calibrate.model.experts import linear_experts
from keepmtp.quantize.calibrate.model.skeleton import Batch, Skeleton
from keepmtp.quantize.plan.plan import make_plan
from keepmtp.recipes.errors import CheckpointError, RecipeError
from keepmtp.recipes.find import shipped_recipes
from llmcompressor.modeling.moe.linear_experts import LinearExperts2D
from passes import as_calibrated
from releases import source_layout, write_checkpoint
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Glm4MoeConfig
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeExperts

CPU = torch.device("cpu")
IDS = torch.randint(3, 300, (2, 24), generator=torch.Generator().manual_seed(0))


RECIPES = {r.model: r for r in shipped_recipes() if not r.calibrated_schemes() and r.mtp != "auto"}


def logits(skeleton: Skeleton, ids: Tensor) -> Tensor:
    """Layer by layer, as calibration walks, without calibrating."""
    batch = Batch(ids=ids)
    with torch.no_grad():
        for index in range(len(skeleton)):
            outputs = []
            keep = lambda _module, _args, output, to=outputs: to.append(output)  # noqa: E731
            with skeleton.layer(index) as layer, layer.register_forward_hook(keep):
                for arguments in skeleton.feed(index, [batch]):
                    skeleton.model(**arguments, use_cache=False)
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
    "gemma-4-26b-assistant": "no list of 0 layers",
    "inkling": "only concatenation can be undone",
    "ling-3.0-flash": "only Python of the checkpoint's own",
    "mimo-v2.5": "only Python of the checkpoint's own",
    "longcat-flash-chat": "must have a parameter for",
    "openpangu-ultra": "only Python of the checkpoint's own",
    "ring-2.5-1t": "only Python of the checkpoint's own",
    "step-3.5-flash": "no class for model_type 'step3p5'",
    "step-3.7-flash": "must have a parameter for",
}


@pytest.mark.few(10)
@pytest.mark.parametrize("model", sorted(releases.MODELS.keys() & RECIPES))
def test_every_family_is_bound_or_refused(model, tmp_path):
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
    refused = nullcontext()
    if model in REFUSED:
        rule = rf"{REFUSED[model]}.*Use a data-free scheme"
        refused = pytest.raises((RecipeError, CheckpointError), match=rule)
    with refused:
        skeleton = Skeleton(plan, device=CPU)
        assert all(skeleton.bind_layer(index) for index in range(len(skeleton)))


BIAS = torch.zeros(384, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("index", "name", "change", "says"),
    [
        (1, "mlp.gate.weight", None, "must be on disk; got nothing for mlp.gate.weight"),
        (
            0,
            "mlp.up_proj.bias",
            lambda _: BIAS,
            "must have a parameter for model.layers.0.mlp.up_pro",
        ),
        (
            2,
            "mlp.experts.3.down_proj.weight",
            lambda value: value[:128].contiguous(),
            "experts.3.down_proj.weight must have shape [256, 128]",
        ),
    ],
)
def test_what_does_not_fit_the_class_is_named(index, name, change, says, tmp_path):
    """A parameter without a tensor, a tensor without a parameter, and a wrong width."""
    folder = shutil.copytree("models/tiny-glm4-moe", tmp_path / "copy")
    name, stem = f"model.layers.{index}.{name}", f"model.layers.{index}."
    index_file, weight_map = folder / "model.safetensors.index.json", {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors = load_file(file)
        if f"{stem}input_layernorm.weight" in tensors or name in tensors:
            value = tensors.pop(name, None)
            if change is not None:
                tensors[name] = change(value)
        save_file(tensors, file)
        weight_map |= dict.fromkeys(tensors, file.name)
    made = json.loads(index_file.read_text()) | {"weight_map": weight_map}
    index_file.write_text(json.dumps(made))
    skeleton = Skeleton(plan_for("tiny-glm4-moe", source=str(folder))[0], device=CPU)
    with pytest.raises(CheckpointError, match=re.escape(says)), skeleton.layer(index):
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


def test_experts_with_a_forward_of_their_own_are_refused(monkeypatch):
    model = nn.Module()
    model.config = Glm4MoeConfig(hidden_size=64, moe_intermediate_size=48, n_routed_experts=6)
    with torch.device("meta"):
        model.experts = Glm4MoeExperts(model.config)
    own = LinearExperts2D.get_linear_experts_cls(Glm4MoeExperts)
    monkeypatch.setattr(own, "forward", lambda *_: None, raising=False)
    with pytest.raises(CheckpointError, match="experts: experts must have the common layout"):
        linear_experts(model)


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
