"""Ground truth for names: what vLLM's target and draft ask their quantization config about, family
by family; and types that share a family's table under other names (helpers/real_releases.py).

The (prefix, layer, method) list is recorded while vLLM's own classes are constructed. A family file
that drifts from vLLM fails here with the prefix; so does an ignore list that leaves vLLM another
choice than the plan made.
"""

from functools import cache, partial
from pathlib import Path

import pytest
import releases
from checkpoint_files import Checkpoint
from data_files import json_of
from dry_corpus import SEPARATE
from good import outputs_of, plan_of, released
from keepmtp.checkpoints.dialects.modules import runtime_modules
from keepmtp.quantize.plan.configs import modules_of
from keepmtp.quantize.plan.plan import Plan
from keepmtp.recipes.families import find_family, find_view
from keepmtp.recipes.family import HFName
from keepmtp.recipes.family_view import FamilyView
from keepmtp.validate.check.check import examine
from keepmtp.validate.dryload.failures import known_defect
from keepmtp.validate.dryload.verdict_findings import objections
from keepmtp.validate.facts.dry_load import LoadAccount, Question
from keepmtp.validate.facts.vllm_env import find_vllm
from real_releases import WRAPPED, nemotron_omni

SCHEME = "FP8_DYNAMIC"  # the one that every family's modules take
MTP = ("bf16", SCHEME)
# A draft with a checkpoint of its own has no target to be built beside.
MODELS = [*(model for model in releases.MODELS if model not in SEPARATE), *WRAPPED]
# What is asked about its cache, or for whole-number formats only.
NOT_A_MATRIX = ("Attention", "VocabParallelEmbedding", "MambaMixer2")
# Nemotron Omni as transformers' class reads it, and with a quantization config at the top level
# alone; what vLLM raises for each, and its cure.
NATIVE = "nemotron_h_omni"
OUTSIDE = "outside"
DEFECTS = {
    NATIVE: ("vit_hidden_size", "--trust-remote-code"),
    OUTSIDE: ("CompressedTensorsConfig", "llm_config"),
}
ROLES = {"backbone": "target", "mtp": "draft"}
SOUNDS = "mimo-v2.5 with its audio_tokenizer"
# Parameters of towers that the fixtures leave out.
NO_TOWER = ("vision_model.", "mlp1.", "vision_final_layernorm.")

pytestmark = pytest.mark.vllm


@cache
def plan(model: str, mtp: str) -> Plan:
    make = WRAPPED.get(model, partial(releases.source_layout, model))
    return plan_of(*make(), model, SCHEME, mtp)


@cache
def view_of(model: str) -> FamilyView:
    """The table as the installed vLLM has it."""
    source = plan(model, "bf16").source
    return find_view(source.config, model, source.entries, find_vllm().version)


def with_audio_tokenizer(folder: Path) -> None:
    (folder / "audio_tokenizer").mkdir()
    (folder / "audio_tokenizer" / "config.json").write_text("{}")


@pytest.fixture(scope="module")
def accounts(dry_loaded) -> dict[object, LoadAccount]:
    """(model, MTP policy) -> what vLLM did with what keepmtp writes; and three by name."""
    made = {(model, mtp): outputs_of(plan(model, mtp)) for model in MODELS for mtp in MTP}
    config, tensors = nemotron_omni(NATIVE)
    outside = outputs_of(plan("NemotronH_Omni_Reasoning_V3", SCHEME))
    sounds = released("mimo-v2.5")
    del outside.config["llm_config"]["quantization_config"]
    sounds.after = with_audio_tokenizer
    others = {NATIVE: Checkpoint(config=config, tensors=tensors), OUTSIDE: outside, SOUNDS: sounds}
    return dry_loaded(made | others)


def questions(account: LoadAccount, part: str) -> list[Question]:
    """What was asked on behalf of a part; skips a part that a known defect of vLLM's keeps from
    being built.
    """
    model, written = account.of(ROLES[part])
    family = find_family(json_of(Path(account.path) / "config.json"), account.path)
    failure = account.load.failure
    if not model.cls and failure:
        version = find_vllm().version
        defect = known_defect(failure, family=family.model_type, dialect="", version=version)
        assert defect, failure
        pytest.skip(f"vLLM cannot build it: {defect.says}")
    # A layer without a place in the model was thrown away again during construction.
    return [
        asked for asked in written.asked if asked.path and not asked.layer.endswith(NOT_A_MATRIX)
    ]


@cache
def table(model: str, part: str) -> dict[str, bool]:
    """Runtime name of every matrix of a part -> whether the family's table says that vLLM asks
    about it.
    """
    source = plan(model, "bf16").source
    view = view_of(model)
    used = view.family.loader.num_layers_used or view.num_mtp_layers
    names: dict[str, bool] = {}
    for name, entry in source.entries.items():
        place = view.place(HFName(name))
        first = 0 if view.layout.mtp else view.num_layers
        if place.part != part or (
            part == "mtp" and place.layer is not None and place.layer - first >= used
        ):
            continue
        if place.role == "experts" or (place.leaf == "weight" and len(entry.shape) >= 2):
            names[place.runtime] = place.row.loads_quantized
            if place.row.joins:
                names[place.row.joins] = True
    return names


@pytest.mark.parametrize("part", ["backbone", "mtp"])
@pytest.mark.parametrize("model", MODELS)
def test_vllm_asks_for_the_modules_in_the_table_and_no_other(model, part, accounts):
    """vLLM asks about the names that the table says it asks about."""
    asked = questions(accounts[model, "bf16"], part)
    heads = set()
    matrices = set()
    towers = set()
    opaque = tuple(runtime for _, runtime, _ in view_of(model).layout.opaque)
    for each in asked:
        if each.layer == "ParallelLMHead":
            heads.add(each.prefix)
        elif each.prefix.startswith(opaque or " "):
            towers.add(each.prefix)
        else:
            matrices.add(each.prefix)
    ours = {name: asks for name, asks in table(model, part).items() if not is_head(model, name)}
    asks = {name for name in ours if ours[name]}
    assert matrices <= asks, "vLLM asks about modules that the table does not know, or keeps plain"
    if view_of(model).layout.vision is not None:
        assert not {name for name in towers if ours.get(name) is False}, "it asks about a tower"
    assert asks <= matrices | towers, "the table has modules that vLLM never asks about"
    assert all(is_head(model, name) for name in heads - {""}), "a head under an unknown name"


@pytest.mark.parametrize("model", MODELS)
def test_vllm_asks_about_the_embeddings_in_the_table(model, accounts):
    """By name or without one, of target and draft; where both could be built."""
    view = view_of(model)
    account = accounts[model, "bf16"]
    (named,) = {row.runtime or row.path for row in view.layout.top if row.role == "embedding"}
    for part, role in ROLES.items():
        built, written = account.of(role)
        asked = {each.prefix for each in written.asked if "Embedding" in each.layer}
        ours = set()
        if part in view.family.embeddings:
            ours = {view.family.embeddings[part].format(named)}
        assert asked == ours or not built.cls


def is_head(model: str, name: str) -> bool:
    view = view_of(model)
    rows = [*view.layout.top, *view.family.mtp_block, *view.layout.mtp_top]
    heads = [f".{row.runtime or row.path}" for row in rows if row.role == "head"]
    return name == view.layout.draft_head or f".{name}".endswith(tuple(heads))


@pytest.mark.parametrize("mtp", MTP)
@pytest.mark.parametrize("model", MODELS)
def test_the_ignore_list_makes_vllm_choose_what_the_plan_chose(model, mtp, accounts):
    """Of every question: quantized by vLLM exactly where the plan quantizes."""
    chosen = {
        str(module.name): module.scheme for module in runtime_modules(modules_of(plan(model, mtp)))
    }
    wrong = {}
    for part in ("backbone", "mtp"):
        for question in questions(accounts[model, mtp], part):
            is_quantized = bool(question.method) and not question.method.startswith("Unquantized")
            if is_quantized != bool(chosen.get(question.prefix)):
                wrong[question.prefix] = (question.method, chosen.get(question.prefix))
    assert not wrong


def test_a_family_file_that_drifts_is_named(accounts):
    """The twin: a table that calls a draft's modules by their names on disk does not agree with
    vLLM.
    """
    theirs = {question.prefix for question in questions(accounts["mimo-7b", "bf16"], "mtp")}
    drifted = {
        name.replace("model.layers.3.", "model.mtp_layers.0.") for name in table("mimo-7b", "mtp")
    }
    assert "model.mtp_layers.0.self_attn.qkv_proj" in drifted - theirs
    assert "model.layers.3.self_attn.qkv_proj" in theirs - drifted


def test_a_tokenizer_of_sounds_is_not_read(accounts):
    """Its weights are in a folder of their own, which no index names."""
    assert accounts[SOUNDS].load.ok and not accounts[SOUNDS].of("target")[1].faults


@pytest.mark.parametrize("name", WRAPPED)
def test_every_tensor_is_read_and_every_parameter_is_filled(name, accounts):
    account = accounts[name, SCHEME]
    assert account.load.failure is None
    faults = [fault.param for role in ("target", "draft") for fault in account.of(role)[1].faults]
    assert [param for param in faults if not param.startswith(NO_TOWER)] == []
    assert all(tensor.startswith("model.time_series.") for tensor in account.unconsumed)


@pytest.mark.parametrize("name", DEFECTS)
def test_what_vllm_cannot_do_with_nemotron_omni_is_a_known_defect(name, accounts):
    failure = accounts[name].load.failure
    words, cure = DEFECTS[name]
    assert failure and words in failure.words
    version = find_vllm().version
    defect = known_defect(failure, family="nemotron_h", dialect="", version=version)
    assert defect and cure in defect.cure


def test_what_vllm_drops_on_purpose_is_no_finding(accounts):
    """Intern-S2's encoder of time series; the same tensor under another name is a finding."""
    account = accounts["intern_s2_preview", SCHEME]
    checked = examine(account.path)
    assert objections(account, checked) == []
    names = ["model.time_serie.norm.weight", "model.time_serie.norm.weight_scale"]
    other = account.model_copy(update={"unconsumed": names})
    found = objections(other, checked)
    assert [each.finding.where for each in found] == names
