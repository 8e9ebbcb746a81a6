"""Ground truth for names: what vLLM's target and draft ask their quantization config about, family
by family.

The (prefix, layer, method) list is recorded while vLLM's own classes are constructed. A family file
that drifts from vLLM fails here with the prefix; so does an ignore list that leaves vLLM another
choice than the plan made.
"""

import json
from functools import cache
from pathlib import Path

import pytest
import releases
from dry_corpus import SEPARATE
from good import ours, planned
from keepmtp.quantize.config.written import modules_of
from keepmtp.recipes.families import find_family, find_view
from keepmtp.recipes.family import HFName
from keepmtp.recipes.family_view import FamilyView
from keepmtp.validate.dryload.failures import known_defect
from keepmtp.validate.facts.dry_load import LoadAccount, Question
from keepmtp.validate.facts.vllm_env import find_vllm

SCHEME = "FP8_DYNAMIC"  # the one that every family's modules take
MTP = ("bf16", SCHEME)
# A draft with a checkpoint of its own has no target to be built beside.
MODELS = [model for model in releases.MODELS if model not in SEPARATE]
# What is asked about its cache, or for whole-number formats only.
NOT_A_MATRIX = ("Attention", "VocabParallelEmbedding", "MambaMixer2")

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def accounts(dry_loaded) -> dict[tuple[str, str], LoadAccount]:
    """(model, MTP policy) -> what vLLM did with what keepmtp writes."""
    return dry_loaded({(model, mtp): ours(model, SCHEME, mtp) for model in MODELS for mtp in MTP})


def questions(account: LoadAccount, part: str) -> list[Question]:
    """What was asked on behalf of a part; skips a part that a known defect of vLLM's keeps from
    being built.
    """
    model, written = account.of("draft" if part == "mtp" else "target")
    family = find_family(json.loads((Path(account.path) / "config.json").read_text()), account.path)
    failure = account.load.failure
    if not model.cls and failure:
        defect = known_defect(failure, family=family.model_type, version=find_vllm().version)
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
    config, tensors = releases.source_layout(model, size="tiny")
    view = find_view(config, model)
    used = view.family.loader.num_layers_used or view.num_mtp_layers
    names: dict[str, bool] = {}
    for name, (_, shape) in tensors.items():
        place = view.place(HFName(name))
        first = 0 if view.layout.mtp else view.num_layers
        if place.part != part or (
            part == "mtp" and place.layer is not None and place.layer - first >= used
        ):
            continue
        if place.role == "experts" or (place.leaf == "weight" and len(shape) >= 2):
            names[place.runtime] = place.row.loads_quantized
    return names


@pytest.mark.parametrize("part", ["backbone", "mtp"])
@pytest.mark.parametrize("model", MODELS)
def test_vllm_asks_for_the_modules_in_the_table_and_no_other(model, part, accounts):
    """Every name that vLLM asks about is in the table, and vLLM asks about every name that the
    table says it does.
    """
    asked = questions(accounts[model, "bf16"], part)
    config, _ = releases.source_layout(model, size="tiny")
    view = find_view(config, model)
    opaque = tuple(runtime for _, runtime, _ in view.layout.opaque)
    matrices = {
        q.prefix
        for q in asked
        if q.layer != "ParallelLMHead" and not (opaque and q.prefix.startswith(opaque))
    }
    ours = {name: asks for name, asks in table(model, part).items() if not is_head(view, name)}
    assert matrices - set(ours) == set(), "vLLM asks about modules that the table does not know"
    never_asked = {name for name, asks in ours.items() if asks} - matrices
    assert never_asked == set(), "the table has modules that vLLM never asks about"
    heads = {q.prefix for q in asked if q.layer == "ParallelLMHead"}
    assert {name for name in heads - {""} if not is_head(view, name)} == set(), (
        "a head under an unknown name"
    )


def is_head(view: FamilyView, name: str) -> bool:
    rows = [*view.layout.top, *view.family.mtp_block, *view.layout.mtp_top]
    own = {row.runtime or row.path for row in rows if row.role == "head"}
    return name == view.layout.draft_head or any(
        name == head or name.endswith(f".{head}") for head in own
    )


@pytest.mark.parametrize("mtp", MTP)
@pytest.mark.parametrize("model", MODELS)
def test_the_ignore_list_makes_vllm_choose_what_the_plan_chose(model, mtp, accounts):
    """Of every question: quantized by vLLM exactly where the plan quantizes."""
    chosen = {str(module.name): module.scheme for module in modules_of(planned(model, SCHEME, mtp))}
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
