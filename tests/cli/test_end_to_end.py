"""The shipped, trained checkpoints through the whole line, judged by readers that are not
keepmtp's.

transformers loads the backbone, compressed-tensors decompresses every weight, and what the model
computes is compared with the source: a checkpoint of the right shape and the wrong numbers would
pass everything else.
"""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from commands import GLM, IN_F32, captured
from data_files import json_of
from keepmtp.pipeline import plan_for, quantize
from keepmtp.quantize.plan.plan import Plan
from keepmtp.recipes.schemes import SCHEMES
from writing import weights_of
from written_values import decompressed

PROMPTS = (
    "Question: Tom has 5 apples. Tom buys 7 more apples. How many apples does Tom have now?\nAnswer:",
    "Question: Ann has 14 books. Ann gives away 6 books. How many books are left?\nAnswer:",
)
# Largest |w - q(w)| as a part of the weight's amax, rounding to nearest. Integers: half a step,
# plus a BF16 quotient's own rounding of up to 2**-8 of 8 (or 128) steps, plus the result's in BF16.
# FP8: half of E4M3's 2**-3 relative step. 4-bit floats: half of the gap from 4 to 6 in sixths, or
# all of the gap to amax where a power-of-two scale saturates (MXFP4), plus the rounding of an E4M3
# scale.
ERROR = {
    "W4A16": (0.5 + 8 * 2**-8) / 7.5 + 2**-8,
    "W8A16": (0.5 + 128 * 2**-8) / 127.5 + 2**-8,
    "W8A8": (0.5 + 128 * 2**-8) / 127.5 + 2**-8,
    "FP8_BLOCK": 2**-4,
    "FP8_DYNAMIC": 2**-4,
    "NVFP4A16": 1 / 6 + 2**-4,
    "MXFP4": 0.25,
    "MXFP4A8": 0.25,
    "MXFP4A16": 0.25,
}


def make(model: str, tmp_path_factory, **choices: str) -> tuple[Plan, Path]:
    """A checkpoint by a recipe, or by a folder alone, where a scheme is for every group."""
    plan, text = plan_for(model, **choices)
    out = tmp_path_factory.mktemp("made") / "out"
    result = quantize(plan, text, out=out, threads=2)
    assert result.report.ok and not result.report.findings
    return result.plan, out


@pytest.fixture(scope="module", params=["tiny-glm4-moe", "tiny-qwen3_5"])
def default(request, tmp_path_factory) -> tuple[Plan, Path]:
    """What `make quantize` makes of each shipped model."""
    return make(request.param, tmp_path_factory)


def within_the_schemes_error(plan: Plan, out: Path) -> None:
    """Every quantized weight as compressed-tensors' own compressor reads it, by a group that
    config.json has.
    """
    config = json_of(out / "config.json")["quantization_config"]
    groups = [group["weights"] for group in config["config_groups"].values()]
    source = weights_of(plan.source.folder)
    stored = weights_of(out)
    quantized = [tensor for tensor in plan.tensors if tensor.fate == "quantize"]
    record = json_of(out / "keepmtp.json")
    assert record["tensors"]["quantize"] == len(quantized) > 5
    assert record["source"]["name"] == plan.source.folder.name
    for tensor in quantized:
        assert SCHEMES[tensor.scheme].config_group()["weights"] in groups
        original = source[tensor.name].float()
        module = tensor.name.removesuffix(".weight")
        got = decompressed(tensor.scheme, module, stored).float()
        error = (original - got).abs().max() / original.abs().max()
        assert 0 < error <= ERROR[tensor.scheme], f"{tensor.name}: {error}"


def test_weights_decompress_to_within_the_schemes_error(default):
    within_the_schemes_error(*default)


def logits_of(folder: Path) -> torch.Tensor:
    """Logits of transformers' own class on the prompts; every weight must be found in the
    checkpoint.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["mismatched_keys"], info
    prompts = (tokenizer(prompt, return_tensors="pt") for prompt in PROMPTS)
    with torch.no_grad():
        return torch.cat([model(**prompt).logits[0].float() for prompt in prompts])


def test_backbone_computes_what_the_source_computes(default):
    """Loaded by transformers: the greedy next token agrees nearly everywhere, the logits are
    close.
    """
    plan, out = default
    before = logits_of(plan.source.folder)
    after = logits_of(out)
    similarity = torch.cosine_similarity(before, after, dim=-1)
    assert similarity.min() > 0.9 and similarity.mean() > 0.99, similarity
    assert (before.argmax(-1) == after.argmax(-1)).float().mean() > 0.9


@pytest.mark.few(8, 16)
@pytest.mark.parametrize("mtp", ["source", "FP8_DYNAMIC", "W4A16", "NVFP4A16"])
@pytest.mark.parametrize(
    "scheme", ["FP8_DYNAMIC", "FP8_BLOCK", "NVFP4A16", "W4A16", "W8A16", "MXFP4"]
)
def test_every_scheme_and_policy_passes_its_check(scheme, mtp, tmp_path_factory):
    """`--scheme S --mtp P`: written, checked clean, and what was packed decompresses within its
    scheme's error.
    """
    folder = str(GLM)
    plan, out = make(folder, tmp_path_factory, scheme=scheme, mtp=mtp)
    within_the_schemes_error(plan, out)
    glue = next(tensor for tensor in plan.tensors if tensor.name.endswith("eh_proj.weight"))
    assert glue.fate == "keep" and glue.scheme == ""


def test_gate_and_up_share_their_global_scale(tmp_path_factory):
    """q/k/v, gate/up, and gate/up of each expert: vLLM keeps one value for the fused module."""
    _, out = make("tiny-glm4-moe", tmp_path_factory, scheme="NVFP4A16", mtp="NVFP4A16")
    written = weights_of(out)
    scales = [name for name in written if name.endswith(".weight_global_scale")]
    fused = [name for name in scales if ".gate_proj." in name or ".q_proj." in name]
    assert len(fused) > 10
    for name in fused:
        other = name.replace(".gate_proj.", ".up_proj.").replace(".q_proj.", ".v_proj.")
        assert torch.equal(written[name], written[other]), name
    assert len({float(written[name]) for name in scales}) > 5, "not one scale for everything"


@pytest.mark.full
@pytest.mark.parametrize(
    "recipe",
    [
        "tiny-glm4-moe.w4a16-gptq",
        "tiny-glm4-moe.w4a16-awq",
        "tiny-glm4-moe.w8a8-smoothquant",
        "tiny-qwen3_5.fp8",
    ],
)
def test_every_algorithm_through_the_command(recipe, tmp_path):
    """A process of its own, as people start it: what llm-compressor logs and wants configured is
    part of it. GPTQ logs at a level that is not there where its log is disabled.
    """
    words = ["quantize", recipe, "--out", str(tmp_path / "out"), "--json"]
    env = os.environ | {"LLM_COMPRESSOR_LOG_DISABLED": "true"}
    done = captured([sys.executable, *IN_F32, *words], status=0, env=env)
    assert json.loads(done.stdout)["check"]["ok"]
    rows = json_of(tmp_path / "out" / "keepmtp.json")["calibration"]["rows"]
    source, quantized = (row["acceptance"]["by_position"]["1"][0] for row in rows[:2])
    assert source > 0.95 and quantized > 0.97 * source
    assert rows[0]["perplexity"] < rows[1]["perplexity"] * 1.05
