"""What fix writes for a block of the release into a quantization config: for every family, and as vLLM loads it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import releases
from checkpoint_files import Checkpoint, write
from foreign_form import in_hf_quant_config, modelopt
from good import llmcompressor, native_bf16_mtp, ours, qwen_fp8, released
from keepmtp.checkpoints.source import open_source
from keepmtp.cure.fix import Outcome, proposed
from keepmtp.recipes.errors import RecipeError
from written_values import without_block

# A draft with a checkpoint of its own has no block to lose.
MODELS = [model for model in releases.MODELS if "assistant" not in model]
# FP8 with a scale for 32 x 32 weights, and FP8_BLOCK has one for 128 x 128.
IN_BLOCKS_OF_32 = ["dsv4.1-flash"]


def grafted(place: Path, model: str, checkpoint: Checkpoint, **choices: Any) -> Outcome:
    lost = write(place / "lost", without_block(checkpoint))
    release = open_source(write(place / "release", released(model)))
    return proposed(str(lost), release=release, **choices)


def errors(made: Outcome) -> list[tuple[str, str]]:
    return [
        (each.where, each.says) for each in made.after.data.findings if each.severity == "error"
    ]


# --- every family ---------------------------------------------------------------------------------


@pytest.mark.few(10)
@pytest.mark.parametrize("model", MODELS)
def test_a_block_that_was_dropped_is_as_the_config_says(model, tmp_path):
    """Entries for the lost block are there or not, names are whole or regexes: the result has no
    error.
    """
    for make, word in ((llmcompressor, "bf16"), (llmcompressor, "FP8_DYNAMIC"), (ours, "source")):
        if word == "source" and model in IN_BLOCKS_OF_32:
            word = "bf16"
        place = tmp_path / f"{make.__name__} {word}"
        assert errors(grafted(place, model, make(model, "FP8_DYNAMIC"), mtp=word)) == [], place


@pytest.mark.parametrize("model", IN_BLOCKS_OF_32)
def test_blocks_of_another_size_than_a_scheme_has_do_not_stay(model, tmp_path):
    says = r"mtp attention: `source` needs a form that compressed-tensors can say; got fp8_block in mtp"
    with pytest.raises(RecipeError, match=says):
        grafted(tmp_path, model, ours(model, "FP8_DYNAMIC"), mtp="source")


@pytest.mark.parametrize(
    "model", ["glm-4.7", "glm-5", "qwen3.5-27b", "qwen3.5-397b", "qwen3-next-80b", "step-3.5-flash"]
)
@pytest.mark.parametrize(
    "form", [modelopt, lambda *words: in_hf_quant_config(modelopt(*words))], ids=["both", "hf"]
)
def test_modelopt_releases_that_dropped_theirs(model, form, tmp_path):
    """Model-Optimizer #733, #750, #2427: Qwen3-Next, GLM-4.7 and others; their excludes name no MTP
    block.
    """
    checkpoint = form(model, "NVFP4")
    holders = [checkpoint.config.get("quantization_config", {}), *checkpoint.json_files.values()]
    block = ("mtp", "model.layers.3.*", "model.layers.4.*")
    for inner in (holder.get("quantization", holder) for holder in holders):
        for key in inner.keys() & {"exclude_modules", "ignore"}:
            inner[key] = [entry for entry in inner[key] if not entry.startswith(block)]
    made = grafted(tmp_path, model, checkpoint)
    assert errors(made) == [] and made.proposal.edits, "an entry was needed, and written"
    with pytest.raises(
        RecipeError, match="a packed MTP block is written in compressed-tensors only"
    ):
        proposed(made.proposal.source, release=made.block.source, mtp="FP8_DYNAMIC")


def test_an_entry_for_the_backbone_and_the_block_is_narrowed(tmp_path):
    """One regex for the same module of all layers, and the block is packed now: the backbone keeps
    its part.
    """
    checkpoint = llmcompressor("glm-4.7", "FP8_DYNAMIC")
    checkpoint.quantization["ignore"] += [r"re:.*self_attn\.o_proj$"]
    for layer in range(3):
        module = f"model.layers.{layer}.self_attn.o_proj"
        checkpoint.tensors[f"{module}.weight"] = ("BF16", checkpoint.tensors[f"{module}.weight"][1])
        del checkpoint.tensors[f"{module}.weight_scale"]
    made = grafted(tmp_path, "glm-4.7", checkpoint, mtp="FP8_DYNAMIC")
    assert errors(made) == []
    ignore = json.loads(made.proposal.files()["config.json"])["quantization_config"]["ignore"]
    assert r"re:.*self_attn\.o_proj$" not in ignore
    assert any(re.match(entry[3:], "model.layers.0.self_attn.o_proj") for entry in ignore)


def test_native_fp8_takes_the_releases_own_bytes(tmp_path):
    made = grafted(tmp_path / "v3", "deepseek-r1", native_bf16_mtp())
    assert errors(made) == [], "entries for the plain block of the old config are gone"
    names = {output.name for tensor in made.block.tensors for output in tensor.outputs}
    assert "model.layers.3.self_attn.o_proj.weight_scale_inv" in names
    plain = grafted(tmp_path / "plain", "deepseek-r1", native_bf16_mtp(), mtp="bf16")
    assert errors(plain) == []
    release = write(tmp_path / "release", qwen_fp8())
    lost = write(tmp_path / "lost", without_block(qwen_fp8()))
    made = proposed(str(lost), release=open_source(release))
    assert errors(made) == [] and made.proposal.edits == [], "config.json says it already"


# --- vLLM loads the result ------------------------------------------------------------------------
