"""The probe on real vLLM servers: a target that is broken in other scripts alone, a draft that is
broken, and a cache with wrong scales.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from commands import GLM
from data_files import json_of, put_json
from keepmtp.checkpoints.identity import identify
from keepmtp.checkpoints.source import open_source
from keepmtp.recipes.conventions import FP8_CACHE
from keepmtp.validate.facts.probed import worse
from keepmtp.validate.facts.schema import ReasonFact
from keepmtp.validate.facts.served import Served
from keepmtp.validate.facts.settle import CHANCE
from keepmtp.validate.facts.vllm_env import find_vllm
from keepmtp.validate.measure import lossless
from keepmtp.validate.measure.harness import Model, Setup
from keepmtp.validate.measure.serve_check import AcceptanceStation, ServeCheck
from keepmtp.validate.report.gates import judge
from real_vllm import HAS_AVX512, NEEDS_VLLM, NO_AVX512, UNIPROC, measure
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

pytestmark = [*NEEDS_VLLM, pytest.mark.full]
TOKENIZER = Tokenizer.from_file(str(GLM / "tokenizer.json"))


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


# The last bytes of all characters that are not ASCII, and those of the prompts.
ENDS = [ids_of(chr(code))[-1] for code in range(0x80, 0xC0)]
LAST = {ids_of(prompt)[-1] for prompt in lossless.PROMPTS.values()}
# Of each script the first, as it is and as JSON: enough for the exact sign test.
FIRST = {name: prompt for name, prompt in lossless.PROMPTS.items() if " 1" in name}
# A sign of three bytes, of which no prompt has the second or third at its end.
SIGN = next(
    sign
    for sign in (ids_of(chr(code)) for code in range(0x2190, 0x2300))
    if not LAST & {*sign} and len({*sign}) == 3
)
DEPTH = 500


def remade(good: Path, folder: Path, change: Callable[[str, Tensor], Tensor]) -> Path:
    shutil.copytree(good, folder)
    for path in folder.glob("*.safetensors"):
        tensors = {name: change(name, tensor) for name, tensor in load_file(path).items()}
        save_file(tensors, path, metadata={"format": "pt"})
    return folder


@pytest.fixture(autouse=True)
def asked(monkeypatch):
    monkeypatch.setattr(lossless, "PROMPTS", FIRST)


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    """A model in which each token has one successor: after a character that is not ASCII it writes
    signs, else a row of `a`. Its draft sees nothing.
    """
    next_of = torch.full((512,), ids_of("a")[0])
    next_of[ENDS] = SIGN[0]
    next_of[SIGN] = torch.tensor([*SIGN[1:], SIGN[0]])
    # Tokens with one successor have one vector, which is the row of that successor in the head.
    rows = torch.randn(512, 256, generator=torch.Generator().manual_seed(0)).sign()
    head = torch.zeros(512, 256)
    head[next_of] = rows[next_of]

    def change(name: str, tensor: Tensor) -> Tensor:
        if name.endswith(("o_proj.weight", "down_proj.weight", "eh_proj.weight")):
            tensor = torch.zeros_like(tensor)
        made = {"model.embed_tokens.weight": rows[next_of], "lm_head.weight": head}
        made["model.norm.weight"] = torch.ones(256)
        return made.get(name, tensor).to(tensor.dtype).clone()

    return remade(GLM, tmp_path_factory.mktemp("plain") / "model", change)


def probed(folder: Path, out: Path, *ks: int, depths: tuple[int, ...] = (0,)) -> Served:
    setup = Setup(vllm=find_vllm(), out=out, timeout=400, extra=UNIPROC)
    asked = {"ks": ks, "prompts": ("How many?",), "max_tokens": 48, "depths": depths}
    model = Model(role="checkpoint", source=open_source(folder), identity=identify(folder))
    found = measure(
        AcceptanceStation(setup=setup, source=None, checkpoint=model, **asked)
    ).checkpoint
    assert all(run.loaded for run in found.runs), found.runs
    return found


def judged(checkpoint: Served, source: Served | None = None) -> ReasonFact:
    asked = {"prompts": ("How many?",), "max_tokens": 48, "environment": {}, "seconds": 1.0}
    fact = ServeCheck(source=source, checkpoint=checkpoint, **asked)
    (reason,) = [one for one in judge(serve=fact).reasons if one.gate == "probe"]
    return reason


def test_a_target_that_is_broken_in_other_scripts_alone(plain, tmp_path):
    """The byte tokens that end a character are never written: English, code and JSON are as before.
    Its draft is broken too, which changes no answer.
    """
    good = probed(plain, tmp_path / "good", 0, 1)
    off, on = good.runs
    assert on.draft_tokens > 40 and not on.accepted_tokens
    assert not on.partings and on.probed == off.probed
    assert judged(good).verdict == "pass"
    assert not off.probed[0].seen["characters"]

    def change(name: str, tensor: Tensor) -> Tensor:
        if name == "lm_head.weight":
            tensor[ENDS] = 0
        return tensor

    twin = probed(remade(plain, tmp_path / "twin", change), tmp_path / "bad", 0)
    assert twin.runs[0].outputs[0].text == off.outputs[0].text, "in English"
    names = twin.runs[0].probed[0].seen["characters"]
    assert {name.split()[0] for name in names} >= {"Arabic", "Chinese", "Greek", "Thai"}
    assert not any(name.startswith("code") or name.endswith("JSON") for name in names)
    reason = judged(twin, good)
    assert reason.verdict == "regression" and "of the checkpoint alone" in reason.says
    assert "a fault of characters (Arabic, " in reason.says


@pytest.mark.skipif(not HAS_AVX512, reason=NO_AVX512)
def test_a_cache_with_wrong_scales_is_seen_at_depth(tmp_path):
    """The checkpoint declares an FP8 cache. With right scales MTP on and off agree, alone and after
    other text; with scales that cut everything off, answers after other text repeat themselves.
    """

    def cached(scale: float) -> Path:
        folder = shutil.copytree(GLM, tmp_path / f"{scale}")
        config = json_of(folder / "config.json")
        config["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "format": "dense",
            "quantization_status": "compressed",
            "config_groups": {},
            "ignore": [],
            "kv_cache_scheme": dict(FP8_CACHE),
        }
        put_json(folder / "config.json", config)
        names = [f"model.layers.{n}.self_attn.{leaf}_scale" for n in range(3) for leaf in "kv"]
        path = folder / "model-00001-of-00002.safetensors"
        scales = {name: torch.tensor([scale]) for name in names}
        save_file(load_file(path) | scales, path, metadata={"format": "pt"})
        index = json_of(folder / "model.safetensors.index.json")
        index["weight_map"] |= dict.fromkeys(names, path.name)
        put_json(folder / "model.safetensors.index.json", index)
        return folder

    good = probed(cached(0.05), tmp_path / "good", 0, 1, depths=(0, DEPTH))
    off, on = good.runs
    assert on.drafts and not off.drafts
    assert [each.depth for each in off.probed] == [0, DEPTH]
    assert judged(good).verdict == "pass"

    twin = probed(cached(1e-4), tmp_path / "bad", 0, depths=(0, DEPTH))
    deep = twin.runs[0].probed[1].seen["repetition"]
    assert len(deep) > len(FIRST) / 2 > len(off.probed[1].seen["repetition"])
    reason = judged(twin, good)
    assert reason.verdict == "regression"
    assert reason.says.startswith(f"At depth {DEPTH}, ")
    assert "answers of the checkpoint alone have a fault of " in reason.says
    found = {row[1]: row for row in worse(off.probed[1], twin.runs[0].probed[1])}
    chance, _, new, _ = found["repetition"]
    assert chance < CHANCE and {*new} == {*deep} and any(name.startswith("Arabic") for name in new)
