"""The skeleton: what it binds, holds and refuses, and the next
layer's files, read while this one computes.
"""

import os
import re
import threading
from collections import Counter
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import releases
import torch
import transformers
from calibrated import planned
from keepmtp.checkpoints import values
from keepmtp.checkpoints.source import open_source
from keepmtp.pipeline import plan_for
from keepmtp.quantize.calibrate.layers.work import LayerWork
from keepmtp.quantize.calibrate.model import skeleton as module
from keepmtp.quantize.calibrate.model.binding import linear_experts
from keepmtp.quantize.calibrate.model.skeleton import Skeleton, reading_ahead
from keepmtp.quantize.plan.plan import Plan, make_plan
from keepmtp.recipes.errors import CheckpointError, RecipeError
from llmcompressor.modeling.moe.linear_experts import LinearExperts2D
from packaging.version import Version
from passes import as_calibrated
from releases import shipped_recipes, source_layout, write_checkpoint
from torch import nn
from transformers import Glm4MoeConfig
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeExperts

pytestmark = pytest.mark.usefixtures("in_f32")

CPU = torch.device("cpu")


RECIPES = {r.model: r for r in shipped_recipes() if not r.calibrated_schemes() and r.mtp != "auto"}


# Families that transformers 5.17 cannot build, or whose layers it converts beyond what can be
# undone.
REFUSED = {
    "dsv4.1-flash": "no class for model_type 'deepseek_v41'",
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
# Since when transformers has a class: a layer is bound there, or refused in a sentence.
IN_TRANSFORMERS = {"ling-3.0-flash": "5.20", "ring-2.5-1t": "5.20", "dots3-note-prev": "5.23"}


@pytest.mark.few(10)
@pytest.mark.parametrize("model", sorted(releases.MODELS.keys() & RECIPES))
def test_every_family_is_bound_or_refused(model, tmp_path):
    recipe = RECIPES[model]
    write_checkpoint(tmp_path / "source", *source_layout(model), data="random")
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
    if Version(transformers.__version__) >= Version(IN_TRANSFORMERS.get(model, "99")):
        refused = suppress(RecipeError, CheckpointError)
    with refused:
        skeleton = Skeleton(plan, device=CPU)
        assert all(skeleton.bind_layer(index) for index in range(len(skeleton)))


@pytest.mark.parametrize(
    "name, shape, says",
    [
        ("1.mlp.gate.weight", [], "must be on disk; got nothing for mlp.gate.weight"),
        ("0.mlp.up_proj.bias", [8], "must have a parameter for model.layers.0.mlp.up_pro"),
        (
            "2.mlp.experts.3.down_proj.weight",
            [16, 16],
            "experts.3.down_proj.weight must have shape",
        ),
    ],
)
def test_what_does_not_fit_the_class_is_named(name, shape, says, tmp_path):
    """A parameter without a tensor, a tensor without a parameter, and a wrong width."""
    config, tensors = source_layout("glm-4.7")
    tensors.pop(f"model.layers.{name}", None)
    if shape:
        tensors[f"model.layers.{name}"] = "BF16", tuple(shape)
    plan = planned(write_checkpoint(tmp_path, config, tensors), attention="bf16")
    skeleton = Skeleton(plan, device=CPU)
    with pytest.raises(CheckpointError, match=re.escape(says)), skeleton.layer(int(name[0])):
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
    layout = source_layout("qwen3.5-397b")
    source = open_source(write_checkpoint(tmp_path / "source", *layout, data="random"))
    recipe = RECIPES["qwen3.5-397b"]
    plain = recipe.model_copy(update={"backbone": recipe.backbone | {"experts": "bf16"}})
    packed, kept = (Skeleton(make_plan(each, source), device=CPU) for each in (recipe, plain))
    with packed.layer(1) as one, kept.layer(1) as other:
        torch.testing.assert_close(one.state_dict(), other.state_dict(), rtol=0, atol=0)


# --- files that are read ahead ------------------------------------------------------------------------

# Plain weights, FP8 in blocks, MXFP4, experts in stacks.
MODELS = ("glm-4.7", "deepseek-v3.1", "dsv4-flash", "qwen3.5-397b")


@pytest.fixture(scope="module", params=MODELS)
def plan(request, tmp_path_factory) -> Plan:
    schemes = {"attention": "bf16"} if request.param.startswith(("deepseek", "ds")) else {}
    return planned(
        tmp_path_factory.mktemp(request.param) / "source",
        model=request.param,
        data="random",
        **schemes,
    )


def test_each_byte_of_a_layer_is_read_once_and_of_the_next_one_meanwhile(plan, monkeypatch):
    skeleton = Skeleton(plan, device=CPU)
    done = threading.Event()
    real = values.read
    last = len(skeleton) - 1
    read = Counter[str]()
    ahead = Counter[str]()
    now, then = (
        {n: plan.entries[n].num_bytes for each in skeleton.tensors_of(index) for n in each.inputs}
        for index in (last - 1, last)
    )

    def read_now(source, entry, into, *, offset=0):
        read[entry.name] += len(into)
        real(source, entry, into, offset=offset)

    def read_ahead(_source, entry, into, *, offset=0):
        ahead[entry.name] += len(into)
        if ahead == then:
            done.set()

    monkeypatch.setattr(values, "read", read_now)
    monkeypatch.setattr(module, "read", read_ahead)
    with skeleton.layer(last - 1, last):
        assert read == now, "gate and up of a stack are one tensor"
        assert done.wait(10)


def test_an_expert_keeps_no_more_memory_than_its_own(tmp_path):
    """Gate and up of a stack are views of what was read for both."""
    skeleton = Skeleton(planned(tmp_path / "source", model="qwen3.5-397b"), device=CPU)
    with skeleton.layer(0) as layer:
        storages = {each.untyped_storage() for each in layer.parameters()}
        found = {each.data_ptr(): each.nbytes() for each in storages}
        assert sum(found.values()) == sum(each.nbytes for each in layer.parameters())


def test_a_shard_that_ends_early_is_named_when_its_layer_begins(tmp_path):
    plan = planned(tmp_path / "source")
    skeleton = Skeleton(plan, device=CPU)
    entry = plan.entries[skeleton.tensors_of(1)[0].inputs[0]]
    os.truncate(Path(tmp_path / "source" / entry.file), entry.start + 1)
    with reading_ahead(plan, skeleton.tensors_of(1)):
        pass
    rule = rf"{entry.file}: {entry.name} must be whole; got end of file"
    with pytest.raises(CheckpointError, match=rule), skeleton.layer(1):
        pass


def test_an_end_in_the_middle_waits_for_no_more_than_a_piece(tmp_path, monkeypatch):
    plan = planned(tmp_path / "source")
    calls = []
    begun, stop = threading.Event(), threading.Event()

    def read(*_args: object, **_words: object) -> None:
        calls.append(1)
        begun.set()
        stop.wait(60)

    monkeypatch.setattr(module, "read", read)
    monkeypatch.setattr(module, "threading", SimpleNamespace(Event=lambda: stop))
    with (
        pytest.raises(KeyboardInterrupt),
        reading_ahead(plan, Skeleton(plan, device=CPU).tensors_of(1)),
    ):
        assert begun.wait(60)
        raise KeyboardInterrupt
    assert len(calls) == 1
