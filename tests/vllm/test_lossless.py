"""Lossless on real vLLM servers: a target that is broken in other scripts alone, and a draft that is
broken.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from commands import GLM
from keepmtp.checkpoints.identity import identify
from keepmtp.checkpoints.source import open_source
from keepmtp.validate.facts.lossless import LosslessFact
from keepmtp.validate.facts.schema import ReasonFact
from keepmtp.validate.facts.vllm_env import find_vllm
from keepmtp.validate.measure import lossless
from keepmtp.validate.measure.harness import Model, Setup
from keepmtp.validate.report.gates import judge
from real_vllm import NEEDS_VLLM, UNIPROC, measure
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


def answered(folder: Path, out: Path, k: int, source: Path | None = None) -> LosslessFact:
    setup = Setup(vllm=find_vllm(), out=out, timeout=400, extra=UNIPROC)
    models = {"source": model("source", source), "checkpoint": model("checkpoint", folder)}
    how = {"has_cache": False, "parser": (), "max_tokens": 48}
    return measure(lossless.Lossless(setup=setup, k=k, **how, **models))


def model(role, folder: Path | None) -> Model | None:
    return folder and Model(role=role, source=open_source(folder), identity=identify(folder))


def judged(fact: LosslessFact) -> ReasonFact:
    (reason,) = [one for one in judge(lossless=fact).reasons if one.gate == "lossless"]
    return reason


def test_a_target_that_is_broken_in_other_scripts_alone(plain, tmp_path):
    """The byte tokens that end a character are never written: English, code and JSON are as before.
    Its draft is broken too, which changes no answer.
    """
    good = answered(plain, tmp_path / "good", 1)
    off, off_load, on, on_load = good.checkpoint.asked
    assert [one.k for one in good.checkpoint.asked] == [0, 0, 1, 1]
    assert on.seen == off.seen and on_load.seen == off_load.seen and not on.num_changed
    assert judged(good).verdict == "pass" and "characters" not in off.seen

    def change(name: str, tensor: Tensor) -> Tensor:
        if name == "lm_head.weight":
            tensor[ENDS] = 0
        return tensor

    folder = remade(plain, tmp_path / "twin", change)
    twin = answered(folder, tmp_path / "good", 0, source=plain)
    names = twin.checkpoint.asked[0].seen["characters"]
    assert {name.split()[0] for name in names} >= {"Arabic", "Chinese", "Greek", "Thai"}
    assert not any(name.startswith("code") or name.endswith("JSON") for name in names)
    reason = judged(twin)
    assert reason.verdict == "regression" and "of the checkpoint alone" in reason.says
    assert "a fault of characters (Arabic, " in reason.says
