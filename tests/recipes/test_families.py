"""Family tables against what makers publish (tests/helpers/releases.py), and against the names vLLM
0.33.0 asks for where tests/vllm/test_dry_names.py cannot ask vLLM's own classes.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, replace
from functools import cache
from itertools import starmap
from math import prod
from pathlib import Path

import ask_vllm
import pytest
import releases
from data_files import table
from keepmtp.checkpoints.stored import SCALE_LEAVES
from keepmtp.recipes.errors import RecipeError
from keepmtp.recipes.families import (
    families,
    find_family,
    find_view,
    is_drafted,
    without_table,
)
from keepmtp.recipes.family import Family, HFName
from keepmtp.recipes.family_view import FamilyView
from keepmtp.recipes.frozen import without
from keepmtp.recipes.runtimes import vllm
from keepmtp.recipes.runtimes.vllm import KNOWN, NEWEST, asked, holds
from keepmtp.recipes.schemes import num_bytes
from layouts import MODELS, PUBLISHED, Tensors
from pydantic import TypeAdapter, ValidationError
from real_releases import WRAPPED

TABLE = table("recipes/test_families")
EXPERT = re.compile(r"\.experts\.(\d+)\.")


# Tables found by model_type, of models whose draft vLLM finds by its architecture.
WITH_A_TABLE_BY_ARCHITECTURE = {
    "bailing_hybrid_v3",
    "glm4_moe",
    "glm4_moe_lite",
    "glm_ocr",
    "mimo",
    "mimo_v2",
    "mimo_v2_flash",
}
WITHOUT_TABLE = without_table()


def drafted_names() -> frozenset[str]:
    return asked().model_types | asked().architectures


def vllm_sites() -> Iterable[tuple[str, Path]]:
    """The version of vLLM, and the folder that it is installed in, where it is."""
    python = os.environ.get(
        "VLLM_PYTHON", str(Path(__file__).parent.parent.parent / ".venv-vllm" / "bin" / "python")
    )
    for info in Path(python).parent.parent.glob("lib/python3*/site-packages/vllm*.dist-info"):
        yield info.stem.partition("-")[2], info.parent


@cache
def view_of(model: str, size: str = "tiny") -> tuple[FamilyView, Tensors]:
    config, tensors = releases.source_layout(model, size=size)
    return find_view(config, model), tensors


def without_most_experts(tensors: Tensors) -> list[HFName]:
    """Experts differ by number alone: the first, a two-digit one and the last stand for all."""
    numbers = {name: int((EXPERT.search(name) or [0, 0])[1]) for name in tensors}
    chosen = {0, 10, max(numbers.values())}
    return [HFName(name) for name, number in numbers.items() if number in chosen]


def is_weight(name: str) -> bool:
    return name.rpartition(".")[2] not in SCALE_LEAVES


@pytest.mark.few(24)
@pytest.mark.parametrize("size", ["tiny", "full"])
@pytest.mark.parametrize("model", MODELS)
def test_every_tensor_has_a_place(model, size):
    view, tensors = view_of(model, size)
    assert [name for name in without_most_experts(tensors) if view.place(name) is None] == []


def test_a_table_has_values_of_the_types_that_are_declared():
    """The tables are YAML: no type checker sees a wrong word in them."""
    types = TypeAdapter(Family)
    tables = [asdict(family) for family in families().values()]
    assert [types.validate_python(table) for table in tables] == [*families().values()]
    broken = tables[0] | {"block": [tables[0]["block"][0] | {"role": "attenton"}]}
    with pytest.raises(ValidationError, match=r"block\.0\.role"):
        types.validate_python(broken)


def test_every_family_has_a_fixture():
    """A new family comes with a layout in tests/helpers/layouts/: no table goes untested."""
    covered = {find_family(config, model).model_type for model, config in MODELS.items()}
    assert covered == {family.model_type for family in families().values()}


@pytest.mark.parametrize("model", MODELS)
def test_the_mtp_block_is_all_of_what_is_published(model):
    # Four layers deep: the MTP block is the same, the backbone is not what this counts.
    depth = {"num_hidden_layers": 4}
    changes = depth
    if "text_config" in MODELS[model]:
        changes = {"text_config": depth}
    config, tensors = releases.source_layout(model, size="full", changes=changes)
    view = find_view(config, model)
    found = [name for name in tensors if view.is_mtp(HFName(name))]
    known = PUBLISHED[model]
    assert view.num_mtp_layers == known.num_mtp_layers
    assert view.mtp_layers_of(found) == set(range(known.num_mtp_layers))
    if known.num_mtp_weights is not None:
        assert sum(is_weight(name) for name in found) == known.num_mtp_weights


def test_deepseek_v4_flash_is_what_others_count():
    """1,199 backbone tensors beside the routed experts (anemll/DeepSeek-V4-Flash-FP4-FP8-SSD), 284
    B (its card).
    """
    view, tensors = view_of("dsv4-flash", "full")
    backbone = [name for name in tensors if not name.startswith("mtp.") and is_weight(name)]
    assert len([name for name in backbone if ".experts." not in name]) == 1199
    assert view.num_layers == 43
    total = sum(parameters(tensors[name]) for name in backbone)
    assert total / 1e9 == pytest.approx(284, rel=0.002)


def test_deepseek_v4_1_flash_is_what_others_count():
    """96,085 tensors and 475.2 GiB in 48 shards (public listings of the release's headers)."""
    view, tensors = view_of("dsv4.1-flash", "full")
    assert len(tensors) == 96_085 and view.num_mtp_layers == 3
    assert sum(starmap(num_bytes, tensors.values())) == 510_286_023_000
    # The table has a place for each of them, also for those of one layer alone.
    assert not [name for name in tensors if view.place(HFName(name)) is None]


def parameters(spec: tuple[str, tuple[int, ...]]) -> int:
    """Numbers in a weight; MXFP4 packs two to a byte."""
    dtype, shape = spec
    return prod((*shape, 1 + (dtype == "I8")))


@pytest.mark.parametrize("model", [model for model in MODELS if PUBLISHED[model].billions])
def test_fixtures_have_the_published_size(model):
    _, tensors = view_of(model, "full")
    total = sum(parameters(spec) for name, spec in tensors.items() if is_weight(name))
    assert total / 1e9 == pytest.approx(PUBLISHED[model].billions, rel=0.02)


# What a published header or index counts: names under a prefix, and their bytes. The second is
# Gemma 4 12B's assistant, the third the MTP file of MiMo-V2.5, which has q, k and v in one tensor,
# so that Flash's names count otherwise.
@pytest.mark.parametrize(("model", "changes", "prefix", "count", "size"), TABLE["INDEXES"])
def test_fixtures_have_the_published_index(model, changes, prefix, count, size):
    _, tensors = releases.source_layout(model, size="full", changes=changes)
    chosen = [spec for name, spec in tensors.items() if name.startswith(prefix)]
    assert len(chosen) == (count or len(chosen))
    assert sum(num_bytes(*spec) for spec in chosen) == size


def is_later(view, place) -> bool:
    """Whether it is of a further MTP layer, which is built like the first."""
    first = view.num_mtp_parts
    if not view.layout.mtp:  # its layers are counted with those of the backbone
        first += view.num_layers
    return place.layer is not None and place.layer >= first


@pytest.mark.parametrize("model", [model for model in MODELS if PUBLISHED[model].asks])
def test_runtime_names_of_the_draft_are_those_vllm_asks_for(model):
    """Of drafts that vLLM 0.32.0 cannot build alone; it is asked for all others."""
    view, tensors = view_of(model)
    known = PUBLISHED[model]
    found = {True: set(), False: set()}
    for name, (_, shape) in tensors.items():
        place = view.place(HFName(name))
        if (
            place.part == "mtp"
            and place.leaf == "weight"
            and len(shape) == 2
            and not is_later(view, place)
        ):
            found[place.row.loads_quantized] |= {place.runtime, place.row.joins} - {""}
    assert found[True] == {*known.asks.split()}
    assert found[False] == {*known.unasked.split()}


@pytest.mark.parametrize("model", TABLE["ROLES"])
def test_roles_of_the_mtp_block(model):
    view, tensors = view_of(model)
    roles = Counter[str]()
    for name, (_, shape) in tensors.items():
        place = view.place(HFName(name))
        if place.part == "mtp" and place.leaf == "weight" and len(shape) == 2:
            roles[place.role] += 1
    assert roles == TABLE["ROLES"][model]


def place(model: str, name: str):
    view, _ = view_of(model, "full")
    found = view.place(HFName(name))
    assert found is not None, name
    return found


def test_the_parts_of_a_fused_module_share_a_scale():
    stem = "model.language_model.layers.0.linear_attn.in_proj_"
    parts = {place("qwen3.5-27b", f"{stem}{name}.weight").shares for name in ("qkv", "z")}
    assert len(parts) == 1 and "" not in parts
    whole = "model.layers.0.linear_attn.in_proj_qkvz.weight"
    assert place("qwen3-next-80b", whole).shares == ""
    expert = "mtp.layers.0.mlp.experts.17."
    gate = place("qwen3.5-397b", f"{expert}gate_proj.weight")
    up = place("qwen3.5-397b", f"{expert}up_proj.weight")
    down = place("qwen3.5-397b", f"{expert}down_proj.weight")
    assert gate.shares == up.shares != "" == down.shares
    assert gate.expert == 17
    stacked = place("qwen3.5-397b", "model.language_model.layers.5.mlp.experts.gate_up_proj")
    assert stacked.row.stacked == ("gate_proj", "up_proj")


def test_layer_one_is_not_layer_ten():
    view, _ = view_of("glm-4.5-air", "full")
    for index, part in {1: "backbone", 10: "backbone", 14: "backbone", 46: "mtp"}.items():
        found = view.place(HFName(f"model.layers.{index}.self_attn.o_proj.weight"))
        assert (found.layer, found.part) == (index, part)
    assert not view.is_mtp(HFName("model.layers.4.eh_proj.weight")), (
        "only the MTP layer has an eh_proj"
    )


@pytest.mark.parametrize("model_type", ["mimo_v9", "", *WITHOUT_TABLE])
def test_an_unknown_family_says_what_would_have_to_be_written(model_type, monkeypatch):
    # Names that vLLM has a draft for, and keepmtp no table.
    every = replace(asked(), model_types=asked().model_types | {model_type})
    monkeypatch.setattr("keepmtp.recipes.families.asked", lambda version: every)
    config = {"model_type": model_type, "architectures": ["Never"], "num_nextn_predict_layers": 1}
    with pytest.raises(RecipeError) as caught:
        find_family(config, "somewhere")
    message = str(caught.value)
    assert message.startswith("somewhere/config.json: model_type must be a family of keepmtp")
    assert f"{WITHOUT_TABLE.get(model_type, '')}; got {model_type!r} (arch" in message
    assert "Write its table" in message and "CONTRIBUTING.md" in message


@pytest.mark.parametrize("model_type", ["deepseek_v3_1", "llama", ""])
def test_a_model_that_vllm_has_no_draft_for_is_not_told_to_write_a_table(model_type):
    with pytest.raises(
        RecipeError, match=r"vLLM 0.33 has no MTP draft for this model.*without method=mtp"
    ) as caught:
        find_family({"model_type": model_type, "text_config": {"mtp_num_hidden_layers": 1}}, "x")
    assert repr(model_type) in caught.value.got and "CONTRIBUTING" not in str(caught.value)


def test_what_lies_here_is_what_vllm_says():
    by_mtp = {name for name, family in families().items() if family.method == "mtp"}
    assert by_mtp <= drafted_names() | WITH_A_TABLE_BY_ARCHITECTURE
    assert families().keys() - by_mtp <= asked().refused.keys()  # by another method
    lying = json.loads(vllm.FILE.read_text())
    for version, site in vllm_sites():  # where vLLM is installed
        assert ask_vllm.ask(site) == lying[version]


def test_every_model_that_vllm_drafts_for_has_a_table_or_a_reason():
    """What the README says of vLLM's families: each name that vLLM compares with leads to a table,
    but for those with a reason.
    """
    configs = [*MODELS.values(), *(make()[0] for make in WRAPPED.values())]
    by_table = {*families()}
    for config in configs:
        by_table.update(config["architectures"])
    # Architectures of the model_types mimo_v2 and minimax_m3_mtp, which decide.
    same = {"MiMoV2OmniForCausalLM", "MiniMaxM3MTP"}
    # The draft of one is transformers', and one has stages that vLLM has no class for.
    others = {"mellum", "mistral_large4"}
    assert drafted_names() - by_table - same == WITHOUT_TABLE.keys() - others
    assert WITHOUT_TABLE.keys().isdisjoint(families())


@pytest.mark.parametrize("version", [*KNOWN, "0.33.1rc1.dev7+g1", "0.32.0+cpu", "of my own"])
@pytest.mark.parametrize(
    ("config", "versions"),
    [
        ({"model_type": "step5"}, ">=0.33"),
        ({"model_type": "longcat_flash_ngram"}, "<0.32"),
        ({"model_type": "new", "num_mtp_layers": 1}, ">=0.33"),
        ({"model_type": "new", "num_mtp_layers": 1, "text_config": {}}, "<0"),
        ({"model_type": "new", "num_mtp_layers": 0}, "<0"),
        ({"model_type": "mimo", "architectures": ["MiMoForCausalLM"]}, ">0"),
        ({"model_type": "mellum", "num_nextn_predict_layers": 1}, ">=0.33"),
        ({"model_type": "mistral_large4", "num_nextn_predict_layers": 1}, "<0"),
    ],
)
def test_a_model_is_drafted_for_by_versions(config, versions, version):
    assert is_drafted(config, version) == holds(versions, version)


def test_a_model_of_other_versions_names_them():
    assert find_family({"model_type": "glm5_next"}, "x", vllm="0.34.0").model_type == "glm5_next"
    with pytest.raises(RecipeError, match=r"step5', for which 0\.32\.0 has none\. .*: 0\.33\.0"):
        find_family({"model_type": "step5"}, "x", vllm="0.32.0")
    assert NEWEST == "0.33.0" and asked("0.1.0") == asked(KNOWN[0])


def test_a_model_without_mtp_draft_is_refused_in_vllm_s_own_words(monkeypatch):
    monkeypatch.setattr("keepmtp.recipes.families.families", lambda vllm: {})  # and without a table
    with pytest.raises(RecipeError) as caught:
        find_family(
            {"model_type": "deepseek_v41", "architectures": ["DeepseekV41ForCausalLM"]}, "somewhere"
        )
    message = str(caught.value)
    assert message.startswith("somewhere/config.json: ")
    assert "DeepSeek V4.1 has no classic-MTP draft" in message
    assert "Use speculative method 'dspark' instead of 'mtp'" in message


# MiMo has no class in transformers; DeepSeek-V4's restores the published names only for weights that
# it has loaded.
SAVED = [model for model in MODELS if not PUBLISHED[model].unsaved]


@pytest.mark.parametrize("model", SAVED)
def test_backbone_names_are_those_transformers_saves(model, tmp_path):
    """The fixtures are true: what transformers writes for the same config has the same names and
    shapes.
    """
    import safetensors

    view, tensors = view_of(model)
    built_by_transformers(model).save_pretrained(tmp_path)
    saved = {}
    for path in tmp_path.glob("*.safetensors"):
        with safetensors.safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                saved[name] = tuple(file.get_slice(name).get_shape())
    ours = {}
    for name, (_, shape) in tensors.items():
        if is_weight(name) and (name in saved or not view.is_mtp(HFName(name))):
            ours[name] = shape
    # Published stacked, where transformers 5 writes one tensor an expert; its LongCat has weights
    # for identity experts.
    if model in ("qwen3.5-397b", "longcat-flash-chat"):
        saved = {name: shape for name, shape in saved.items() if ".experts." not in name}
        ours = {name: shape for name, shape in ours.items() if ".experts." not in name}
    assert ours == saved


def test_deepseek_v4_layers_have_the_shapes_transformers_builds():
    _, tensors = view_of("dsv4-flash")
    state = built_by_transformers("dsv4-flash").state_dict()
    # One without compressor, one of each kind of compressor; the first routes by hash.
    for layer in range(3):
        theirs = Counter()
        for name, tensor in state.items():
            shape = tuple(tensor.shape)
            if name.startswith(f"model.layers.{layer}.mlp.experts.gate_up_proj"):
                theirs[(shape[1] // 2, shape[2])] += 2 * shape[0]
            elif name.startswith(f"model.layers.{layer}.mlp.experts."):
                theirs[shape[1:]] += shape[0]
            elif name.startswith(f"model.layers.{layer}."):
                theirs[shape] += 1
        ours = Counter()
        for name, (dtype, shape) in tensors.items():
            if name.startswith(f"layers.{layer}.") and is_weight(name):
                if dtype == "I8":  # MXFP4, two to a byte
                    shape = (shape[0], 2 * shape[1])
                ours[shape] += 1
        assert ours == theirs


def built_by_transformers(model: str):
    import torch
    import transformers

    view, _ = view_of(model)
    config = without(view.config, "quantization_config")
    model_class = getattr(transformers, config["architectures"][0])
    return model_class(model_class.config_class.from_dict(config)).to(torch.bfloat16)


# save_pretrained of these classes spells some names in another way than the release (transformers
# 5.17).
READ_NOT_WRITTEN = ("minimax-m3", "hy4-preview", "qwen3.8-flash-next")


def amiss(folder: Path, config: dict, tensors: Tensors) -> dict[str, set[str]]:
    """What transformers says of names when it loads them."""
    import transformers

    releases.write_checkpoint(folder, config, tensors, data="random")
    model_class = getattr(transformers, config["architectures"][0])
    _, loading = model_class.from_pretrained(folder, output_loading_info=True, dtype="bfloat16")
    return loading


@pytest.mark.parametrize("model", READ_NOT_WRITTEN)
def test_transformers_loads_the_published_names(model, tmp_path):
    assert not any(amiss(tmp_path, *releases.source_layout(model)).values())


def test_a_wrong_name_is_noticed(tmp_path):
    config, tensors = releases.source_layout("hy4-preview")
    wrong = {name.replace("linear_gate", "gate"): spec for name, spec in tensors.items()}
    assert any("gate_proj" in name for name in amiss(tmp_path, config, wrong)["missing_keys"])


def test_a_family_whose_releases_call_tools_in_several_forms_names_no_parser():
    """DeepSeek-V3.2-Exp calls them as V3.1 does, Qwen3-Coder-Next as Qwen3-Coder, and vLLM's parser
    for ERNIE 4.5 reads the thinking model alone.
    """
    for model_type in ("deepseek_v32", "ernie4_5_moe", "qwen3_next"):
        assert not families()[model_type].tool_parser
    assert not families()["ernie4_5_moe"].reasoning_parser
