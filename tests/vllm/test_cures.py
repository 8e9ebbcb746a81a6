"""vLLM's own defects mended where it runs: keepmtp's wheel beside vLLM, and drafts that run with the
cures and not without.

Of the cured families these three have kernels in vLLM's CPU build: Step-3.5, openPangu, and HY3
under modelopt's NVFP4. FP8 under modelopt has none there ("static_scaled_fp8_quant() expected at
most 0 argument(s)"), and its router scores experts by softmax alone where Step asks for sigmoid.
"""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from commands import GLM, captured
from data_files import json_of, put_json
from keepmtp.checkpoints.source import open_source
from keepmtp.quantize.calibrate.mtp.mtp_block import draft_steps
from keepmtp.validate.facts.vllm_env import find_vllm
from keepmtp.validate.measure import cures
from keepmtp.validate.measure.server import server_environment, serving
from real_vllm import NEEDS_VLLM, PLUGIN, QUIET, VLLM_PYTHON, in_vllm
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from wheel import UV, stranger
from writing import filled, lively, plan_over, weights_of

pytestmark = [*NEEDS_VLLM, pytest.mark.full]

PROMPTS = [[5, 9, 33, 120, 7, 66, 41, 18, 29, 300, 12, 8], [400, 3, 3, 17, 250]]
# The lists by layer as the release has them, at the tiny depth.
STEP = {
    "moe_router_activation": "softmax",
    "rope_theta": [5e6, *[1e4] * 6],
    "partial_rotary_factors": [0.5, *[1.0] * 6],
}
CONFIGURATION = """
from transformers import PretrainedConfig

class PanguUltraMoEConfig(PretrainedConfig):
    model_type = "pangu_ultra_moe"
"""
# Checkpoint -> cures, and what stops vLLM without the last of them.
STOPPED = {
    "step-3.5-flash": {"step.layer_types": "IndexError: list index out of range"},
    "openpangu-ultra": {
        "layers.openpangu_layer": "no attribute 'use_sequence_parallel_moe'",
        "layers.openpangu_pair": "'tuple' object has no attribute 'clone'",  # so says the script
    },
    "hy3": {"heads.hy3_draft": r"size of tensor a \(256\) must match the size of tensor b \(512\)"},
}
# As a start of vLLM does: its plugins, then config classes and a draft's class.
START = """
import sys
import vllm.engine.arg_utils
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.transformers_utils.configs import Step3p5Config
import vllm.model_executor.models.step3p5_mtp
ours = sys.modules["keepmtp.validate.keepmtp_cures"]
is_there = any(type(each).__module__ == ours.__name__ for each in sys.meta_path)
print("ANSWERS", ours.__file__, is_there, *sorted(ours.OUTCOMES))
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """The three checkpoints, tiny and of noise."""
    folder = tmp_path_factory.mktemp("cured")
    lively(folder / "step-3.5-flash", "step-3.5-flash", changes=STEP)
    lively(folder / "openpangu-ultra", "openpangu-ultra")
    (folder / "openpangu-ultra/configuration_openpangu_moe.py").write_text(CONFIGURATION)
    in_modelopts_nvfp4(lively(folder / "hy3", "hy3"))
    return folder


def in_modelopts_nvfp4(folder: Path) -> None:
    """Pack the target's attention; everything else is excluded, the head by its name."""
    tensors = load_file(folder / "model.safetensors")
    for name in re.findall(r"(\S+[012]\.self_attn\.[qkvo]_proj\.)weight", " ".join(tensors)):
        rows, columns = tensors[f"{name}weight"].shape
        packed = torch.randint(
            0, 256, (rows, columns // 2), generator=torch.Generator().manual_seed(0)
        )
        tensors[f"{name}weight"] = packed.to(torch.uint8)
        tensors[f"{name}weight_scale"] = torch.ones(rows, columns // 16).to(torch.float8_e4m3fn)
        for leaf in ("weight_scale_2", "input_scale"):
            tensors[f"{name}{leaf}"] = torch.tensor(0.01)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    excluded = ["lm_head", "model.layers.*.mlp*", "model.layers.3*"]
    quantization = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": excluded}
    config = json_of(folder / "config.json")
    put_json(folder / "config.json", config | {"quantization_config": quantization})


def drafted(folder: Path, switched_on: str, place: Path, script: str, **job: object) -> object:
    """What a script of this folder finds with cures, named as for `vllm serve`."""
    place.mkdir()
    vllm = replace(find_vllm(), cures=tuple(switched_on.split(",")))
    variables = server_environment(vllm, place)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("KEEPMTP_CURES", variables["KEEPMTP_CURES"])
        return in_vllm(script, [{"folder": str(folder), **job}], place, PLUGIN)[0]


def dumped(folder: Path, switched_on: str, place: Path) -> dict[str, Tensor]:
    """The first draft of each prompt."""
    out = f"{place}.st"
    asked = {"prompts": PROMPTS, "num_drafts": 1, "out": out, "alone": ""}
    drafted(folder, switched_on, place, "dump_drafts.py", **asked)
    return load_file(out)


@pytest.mark.parametrize("model", STOPPED)
def test_the_draft_runs_with_the_cures_and_is_keepmtps(model, made, tmp_path):
    """Where keepmtp knows how the family drafts: the same logits at every slot, and so the same
    acceptance. Without a cure, vLLM stops.
    """
    needed = cures.needed(open_source(made / model), "0.32.0")
    assert STOPPED[model].keys() <= set(needed)
    seen = dumped(made / model, ",".join(needed), tmp_path / "cured")
    for cure, words in STOPPED[model].items():
        others = ",".join(name for name in needed if name != cure) or "0"
        with pytest.raises(AssertionError, match=words):
            dumped(made / model, others, tmp_path / cure)
    plain = made / model
    if model == "hy3":
        plain = lively(tmp_path / "plain", model)  # a plan takes nothing that is packed
    plan = plan_over(plain, model)
    weights = weights_of(plain)
    if plan.view.family.draft is None:
        assert seen["0.first"].isfinite().all()
        return
    block = filled(plan)
    truth = filled(plan, dtype=torch.float32)
    for index in range(len(PROMPTS)):
        prompt = {leaf: seen[f"{index}.{leaf}"] for leaf in ("ids", "hidden", "positions", "first")}
        right, ours = (first_draft(each, weights, prompt) for each in (truth, block))
        theirs = prompt["first"]
        distances = [(each - right).square().mean().sqrt() / right.std() for each in (theirs, ours)]
        assert distances[0] < 3 * max(distances[1], 2**-8)
        assert (theirs.argmax(-1) == right.argmax(-1)).float().mean() > 0.9


def first_draft(block: nn.Module, weights: dict[str, Tensor], prompt: dict[str, Tensor]) -> Tensor:
    """Logits [T, V] of a block, by its own head where it has one."""
    dtype = next(block.parameters()).dtype
    table = nn.Embedding.from_pretrained(weights["model.embed_tokens.weight"].to(dtype))
    ids = prompt["ids"][None]
    length = len(prompt["positions"])
    hidden = torch.zeros(1, ids.shape[1], table.embedding_dim, dtype=dtype)
    hidden[0, :length] = prompt["hidden"].to(dtype)
    with torch.no_grad():
        output = draft_steps([block], table, ids=ids, hidden=hidden, num_steps=1)[0][0, :length]
        head = block.head.weight if block.head else weights["lm_head.weight"]
        return (output @ head.to(dtype).T).float()


def test_what_needs_no_cure_answers_alike_with_all_of_them(tmp_path):
    asked = {"prompts": ["17 * 23 =", "What is 5 plus 8?"], "num_drafts": 1}
    plain, mended = (drafted(GLM, on, tmp_path / on, "serve.py", **asked) for on in "01")
    assert plain == mended and plain["accepted_tokens"] > 5


def test_a_server_says_what_it_has_applied(made, tmp_path):
    """keepmtp's own servers: the cures that the checkpoint needs, without an installation."""
    folder = made / "step-3.5-flash"
    for path in GLM.glob("tokenizer*"):
        (folder / path.name).write_bytes(path.read_bytes())
    needed = cures.needed(open_source(folder), "0.32.0")
    vllm = replace(find_vllm(), cures=needed)
    with serving(vllm, folder, k=1, log=tmp_path / "log") as server:
        assert server.complete("17 * 23 =", max_tokens=24).token_ids
        assert server.drafts().drafts > 20
        assert "step.draft_scales" in cures.in_words(server.log)


@pytest.fixture(scope="module")
def beside(built, tmp_path_factory) -> Path:
    """keepmtp's wheel, installed where vLLM finds it, without what keepmtp itself needs."""
    folder = tmp_path_factory.mktemp("beside")
    words = [UV, "pip", "install", "-q", "--no-index", "--no-deps", "--target", str(folder)]
    captured([*words, "--python", str(VLLM_PYTHON), str(built)], status=0)
    return folder


@pytest.mark.parametrize(
    ("named", "applied"),
    [
        (None, set()),
        ("step.draft_scales", {"step.draft_scales"}),
        ("1", {"step.draft_scales", "step.layer_types"}),
    ],
)
def test_the_wheel_beside_vllm_is_off_until_it_is_named(named, applied, beside):
    changes = QUIET | {"PYTHONPATH": f"{beside}:{PLUGIN / 'stubs'}"}
    if named is not None:
        changes["KEEPMTP_CURES"] = named
    said = captured([VLLM_PYTHON, "-c", START], env=stranger(**changes), status=0).stdout
    file, is_there, *outcomes = said.partition("ANSWERS ")[2].split()
    assert file == str(beside / "keepmtp/validate/keepmtp_cures/__init__.py")
    assert is_there == str(bool(applied)) and applied <= set(outcomes)
    assert outcomes == [] or named
