"""What is asked, kept and asked again: a server that dies, a run that goes on, a source that is
served once.

The server is a small model in this process: a real one cannot be made to die at a window. Real ones
are asked in tests/vllm/test_closeness.py.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from keepmtp.checkpoints.identity import Identity
from keepmtp.checkpoints.source import open_source
from keepmtp.recipes.errors import CheckpointError, GateError, RecipeError
from keepmtp.validate.facts.vllm_env import VLLM
from keepmtp.validate.measure import closeness as measure
from keepmtp.validate.measure import harness
from keepmtp.validate.measure.closeness import Depth, cut_windows
from keepmtp.validate.measure.compared import FILE, read_compared
from keepmtp.validate.measure.harness import Model, Setup
from keepmtp.validate.measure.server import ServerFailed
from keepmtp.validate.measure.texts import HeldOut
from scipy.special import log_softmax
from vllms import H100

ROOT = Path(__file__).parents[3]
VOCABULARY = 512  # of tiny-glm4-moe
TEXT = HeldOut(
    path="t.jsonl", sha256="7" * 64, texts=tuple("abcdefghij" * 3 for _ in range(6)), against=""
)


class Toy:
    """A server whose logits depend on the last token and on what it serves; it dies after so many
    windows.
    """

    def __init__(
        self, seed: int, noise: float, *, dies_after: int | None = None, raw: bool = False
    ) -> None:
        rng = np.random.default_rng(0)
        self.logits = 3 * rng.standard_normal((VOCABULARY, VOCABULARY))
        self.logits = self.logits + noise * np.random.default_rng(seed).standard_normal(
            self.logits.shape
        )
        self.dies_after, self.raw, self.asked = dies_after, raw, list[tuple[int, ...]]()

    def post(self, path: str, body: Mapping[str, Any], *, timeout: float = 0) -> Any:
        if path == "/tokenize":
            return {"tokens": [1, *body["prompt"].encode()]}
        if self.dies_after is not None and len(self.asked) >= self.dies_after:
            raise ServerFailed("ended by SIGKILL", Path("a.log"))
        self.asked.append(tuple(body["prompt"]))
        rows = [
            self.row(last, after, body)
            for last, after in zip(body["prompt"], body["prompt"][1:], strict=False)
        ]
        return {"choices": [{"prompt_logprobs": [None, *rows]}]}

    def text_of(self, tokens: Sequence[int]) -> str:
        return bytes(each % 128 for each in tokens).decode()

    def row(self, last: int, after: int, body: Mapping[str, Any]) -> dict[str, dict[str, float]]:
        found = log_softmax(self.logits[last]) + 8 * self.raw
        names = dict.fromkeys([after, *np.argsort(-found)[: body["prompt_logprobs"]].tolist()])
        return {str(name): {"logprob": float(np.float32(found[name]))} for name in names}


@pytest.fixture
def toys(monkeypatch) -> dict[str, Toy]:
    """Both servers by the file of their log, and how often each was started."""
    found = {"source": Toy(0, 0.0), "checkpoint": Toy(1, 0.5)}

    @contextmanager
    def serving(vllm: VLLM, folder: Path, *, log: Path, **_: Any) -> Iterator[Toy]:
        yield found[log.suffixes[0].removeprefix(".")]

    monkeypatch.setattr(harness, "serving", serving)
    return found


def model(role: Any, sha256: str) -> Model:
    source = open_source(ROOT / "models/tiny-glm4-moe")
    return Model(role=role, source=source, identity=Identity(sha256=sha256, files={}))


def run(out: Path, **changed: Any):
    texts = changed.pop("text", TEXT)
    before, after = changed.pop("source", "5" * 64), changed.pop("checkpoint", "c" * 64)
    models = model("checkpoint", after), model("source", before)
    setup = Setup(
        vllm=H100,
        out=out,
        **{name: changed.pop(name) for name in ("say", "extra") if name in changed},
    )
    depth = Depth(**({"tokens": 150, "window": 16, "top": 20, "concurrency": 3} | changed))
    return measure.measure(*models, texts, setup=setup, depth=depth)


def test_every_window_is_asked_once_of_each_and_gives_the_figures(toys, tmp_path):
    fact = run(tmp_path)
    assert fact.windows == 10 and fact.tokens == 150 - 10 and fact.texts == 6
    for toy in toys.values():
        assert len(set(toy.asked)) < len(toy.asked), (
            "texts repeat, and the first window is asked again at the end"
        )
        assert len(toy.asked) == 10 + 1
    before, after = toys["source"].logits, toys["checkpoint"].logits
    windows = read_compared(tmp_path / FILE)
    lasts = [last for ids in toys["source"].asked[:10] for last in ids[:-1]]
    p, q = (log_softmax(logits[lasts], axis=1) for logits in (before, after))
    exact = (np.exp(p) * (p - q)).sum(axis=1)
    assert 0.5 * exact.mean() < fact.divergence <= exact.mean()
    assert fact.flips == (p.argmax(axis=1) != q.argmax(axis=1)).sum() > 0
    assert fact.source.repeated == fact.checkpoint.repeated == 0.0
    assert fact.worst[0].nats == max(
        value for line in windows.lines.values() for value in line.nats
    )
    assert 0 < fact.outside < 0.5 and not fact.is_exact and sum(fact.histogram) == fact.tokens
    exact_fact = run(tmp_path / "whole", top=VOCABULARY)
    assert exact_fact.is_exact and exact_fact.divergence == pytest.approx(exact.mean(), rel=1e-4)


@pytest.mark.parametrize("role", ["source", "checkpoint"])
def test_a_server_that_dies_ends_the_run_and_the_next_asks_what_is_missing(role, toys, tmp_path):
    whole = run(tmp_path / "undisturbed")
    toys[role].asked.clear()
    toys[role].dies_after = 4
    with pytest.raises(
        ServerFailed, match=rf"window \d+ of 10 for the {role}; got ended by SIGKILL"
    ) as caught:
        run(tmp_path / "disturbed")
    left = 10 - len(toys[role].asked)
    assert (
        f"the same command asks only the {left} that are missing" in str(caught.value) and left == 6
    )
    toys[role].dies_after = None
    toys[role].asked.clear()
    fact = run(tmp_path / "disturbed")
    assert len(toys[role].asked) == left + 1, "and the first of them again, alone"
    assert len(getattr(fact, role).servers) == 2 and fact.worst == whole.worst
    assert (fact.divergence, fact.flips, fact.histogram) == (
        whole.divergence,
        whole.flips,
        whole.histogram,
    )


def test_what_a_kill_leaves_is_asked_again(toys, tmp_path):
    """A part of a line, a part of a file under its partial name, and a window whose file is
    gone.
    """
    whole = run(tmp_path)
    lines = (tmp_path / FILE).read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if line.startswith(b'{"window"')]
    (tmp_path / FILE).write_bytes(lines[0] + b"".join(kept[:6]) + kept[6][:100])
    (stored,) = tmp_path.glob("closeness.source.*")
    os.unlink(stored / "00003.safetensors")
    (stored / "00003.safetensors.partial").write_bytes(b"half")
    for toy in toys.values():
        toy.asked.clear()
    fact = run(tmp_path)
    assert len(toys["source"].asked) == 1 + 1 and len(toys["checkpoint"].asked) == 4 + 1
    assert fact.divergence == whole.divergence and fact.worst == whole.worst


def test_a_damaged_file_of_the_source_is_named(toys, tmp_path):
    run(tmp_path)
    (tmp_path / FILE).unlink()
    (stored,) = tmp_path.glob("closeness.source.*")
    (stored / "00002.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}      ")
    with pytest.raises(
        CheckpointError, match=r"00002\.safetensors: must be what the source predicts"
    ):
        run(tmp_path)


def test_the_source_is_served_once_for_all_checkpoints(toys, tmp_path):
    run(tmp_path / "one.report")
    toys["source"].asked.clear()
    said: list[str] = []
    fact = run(tmp_path / "two.report", checkpoint="d" * 64, say=said.append)
    assert not toys["source"].asked and said == [
        "The source was asked the same before: taken from one.report."
    ]
    assert len(fact.source.servers) == 1
    run(tmp_path / "three.report", source="6" * 64)
    assert toys["source"].asked, "another source's predictions are its own"


def test_predictions_for_other_text_are_set_aside_and_taken_back(toys, tmp_path):
    first = run(tmp_path)
    said: list[str] = []
    second = run(
        tmp_path,
        text=HeldOut(path="u", sha256="8" * 64, texts=("xyz" * 9,), against=""),
        say=said.append,
    )
    assert second.tokens != first.tokens and len(said) == 1
    for toy in toys.values():
        toy.asked.clear()
    assert run(tmp_path) == first and not any(toy.asked for toy in toys.values())


def test_a_server_that_gives_logits_is_refused(toys, tmp_path):
    toys["source"].raw = True
    with pytest.raises(GateError, match=r"must give log-probabilities.*Leave out --logprobs-mode"):
        run(tmp_path)


def test_windows_begin_as_the_tokenizer_begins_a_text():
    """Also where one goes on in a text; and none is longer than asked, nor all of them together."""

    def tokenize(text: Any) -> list[int]:
        return list(text) if isinstance(text, tuple) else [1, *text.encode()]

    cut = cut_windows(tokenize, TEXT, num_tokens=50, window_size=16)
    assert [len(each) for each in cut] == [16, 16, 16, 2]
    assert all(each[0] == 1 and len(each) <= 16 for each in cut) and sum(map(len, cut)) <= 50
    assert cut[0][1:] + cut[1][1:] == tuple(b"abcdefghij" * 3)
    ids = HeldOut(path="t", sha256="", texts=((7, 8, 9, 10, 11),), against="")
    assert cut_windows(tokenize, ids, num_tokens=150, window_size=3) == [(7, 8, 9), (10, 11)], (
        "they are sent as they are"
    )
    with pytest.raises(RecipeError, match="must hold text of some tokens; got none of two tokens"):
        cut_windows(lambda text: [], TEXT, num_tokens=150, window_size=16)
