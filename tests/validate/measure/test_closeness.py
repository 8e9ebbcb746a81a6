"""What is asked, kept and asked again: a server that dies, a run that goes on, a source that is
served once.

The server is a small model in this process: a real one cannot be made to die at a window. Real ones
are asked in tests/vllm/test_closeness.py.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import GLM
from keepmtp.checkpoints.identity import Identity
from keepmtp.checkpoints.source import open_source
from keepmtp.recipes.errors import CheckpointError, GateError, RecipeError
from keepmtp.validate.facts.served import Drafts
from keepmtp.validate.facts.vllm_env import VLLM
from keepmtp.validate.measure import closeness as measure
from keepmtp.validate.measure import harness
from keepmtp.validate.measure.closeness import Apart, Predictions, compare, cut_windows
from keepmtp.validate.measure.harness import Model, Setup
from keepmtp.validate.measure.replies import Reply
from keepmtp.validate.measure.server import ServerFailed
from keepmtp.validate.measure.texts import HeldOut
from numpy.typing import NDArray
from real_vllm import H100
from real_vllm import measure as found_by
from scipy.special import log_softmax, rel_entr

VOCABULARY = 512  # of tiny-glm4-moe
TEXT = HeldOut(path="t.jsonl", sha256="7" * 64, texts=tuple("abcdefghij" * 3 for _ in range(6)))


class Toy:
    """A server whose logits depend on the last token and on what it serves; it dies after so many
    windows.
    """

    log = Path(os.devnull)

    def __init__(self, seed: int, noise: float) -> None:
        self.logits = 3 * np.random.default_rng(0).standard_normal((VOCABULARY, VOCABULARY))
        self.logits = self.logits + noise * np.random.default_rng(seed).standard_normal(
            self.logits.shape
        )
        self.dies_after, self.raw, self.asked = 1000, False, list[tuple[int, ...]]()

    def post(self, path: str, body: Mapping[str, Any], form: type[Reply], **_: float) -> Reply:
        if path == "/tokenize":
            return form(tokens=(1, *body["prompt"].encode()))
        if len(self.asked) >= self.dies_after:
            raise ServerFailed("ended by SIGKILL", Path("a.log"))
        self.asked.append(tuple(body["prompt"]))
        rows = [
            self.row(last, after, body)
            for last, after in zip(body["prompt"], body["prompt"][1:], strict=False)
        ]
        said = {"choices": [{"prompt_logprobs": [None, *rows]}]}
        return form.model_validate_json(json.dumps(said))

    def drafts(self, *_: Drafts) -> Drafts:
        return Drafts()

    drafts_now = drafts

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
    source = open_source(GLM)
    return Model(role=role, source=source, identity=Identity(sha256=sha256, files={}))


def run(out: Path, **changed: Any):
    texts = changed.pop("text", TEXT)
    before, after = changed.pop("source", "5" * 64), changed.pop("checkpoint", "c" * 64)
    models = model("checkpoint", after), model("source", before)
    depth = {"tokens": 150, "window": 16, "top": 20, "concurrency": 3} | changed
    setup = Setup(vllm=H100, out=out)
    checkpoint, source = models
    return found_by(
        measure.Closeness(setup=setup, source=source, checkpoint=checkpoint, text=texts, **depth)
    )


def file_in(folder: Path) -> Path:
    (path,) = folder.glob("closeness.checkpoint.*.jsonl")
    return path


def test_every_window_is_asked_once_of_each_and_gives_the_figures(toys, tmp_path):
    fact = run(tmp_path)
    assert fact.windows == 10 and fact.tokens == 150 - 10
    for toy in toys.values():
        assert len(set(toy.asked)) < len(toy.asked), "texts repeat"
        assert len(toy.asked) == 10
    before, after = toys["source"].logits, toys["checkpoint"].logits
    lasts = [last for ids in toys["source"].asked[:10] for last in ids[:-1]]
    p, q = (log_softmax(logits[lasts], axis=1) for logits in (before, after))
    exact = (np.exp(p) * (p - q)).sum(axis=1)
    assert 0.5 * exact.mean() < fact.divergence <= exact.mean()
    assert fact.flips == (p.argmax(axis=1) != q.argmax(axis=1)).sum() > 0
    assert 0 < fact.outside < 0.5 and not fact.is_exact
    exact_fact = run(tmp_path / "whole", top=VOCABULARY)
    assert exact_fact.is_exact and exact_fact.divergence == pytest.approx(exact.mean(), rel=1e-4)


@pytest.mark.parametrize("role", ["source", "checkpoint"])
def test_a_server_that_dies_ends_the_run(role, toys, tmp_path):
    """What was answered is asked no more: test_tasks.py, and below."""
    toys[role].dies_after = 4
    says = rf"window \d+ of 10 for the {role}; got ended by SIGKILL.* only the 6 that are missing"
    with pytest.raises(ServerFailed, match=says):
        run(tmp_path)


def test_what_a_kill_leaves_is_asked_again(toys, tmp_path):
    """A part of a line; and a source whose last server did not come to its end."""
    whole = run(tmp_path)
    lines = file_in(tmp_path).read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if line.startswith(b'{"window"')]
    file_in(tmp_path).write_bytes(lines[0] + b"".join(kept[:6]) + kept[6][:100])
    (source,) = tmp_path.glob("closeness.source.*.jsonl")
    for number, left in ((9, 1), (10, 0)):
        lines = source.read_bytes().splitlines(keepends=True)
        kept = [line for line in lines if b'"has_all"' not in line]
        source.write_bytes(b"".join(kept[: 1 + number]))
        toys["source"].asked.clear()
        fact = run(tmp_path)
        assert len(toys["source"].asked) == left
        assert fact.divergence == whole.divergence and fact.stderr == whole.stderr
    assert len(toys["checkpoint"].asked) == 10 + 4


def test_a_damaged_file_of_the_source_is_named(toys, tmp_path):
    run(tmp_path)
    file_in(tmp_path).unlink()
    (stored,) = tmp_path.glob("closeness.source.*/00002.window")
    stored.write_text("[]")
    with pytest.raises(CheckpointError, match=r"00002\.window: must be what the source predicts"):
        run(tmp_path)


def test_what_is_there_is_not_asked_again(toys, tmp_path):
    """Other text, another source and another checkpoint have predictions of their own."""
    first = run(tmp_path)
    other = HeldOut(path="u", sha256="8" * 64, texts=("xyz" * 9,))
    for changed, asked in (
        ({}, set()),
        ({"checkpoint": "d" * 64}, {"checkpoint"}),
        ({"source": "6" * 64}, {"source", "checkpoint"}),
        ({"text": other}, {"source", "checkpoint"}),
        ({}, set()),
    ):
        for toy in toys.values():
            toy.asked.clear()
        found = run(tmp_path, **changed)
        assert {role for role, toy in toys.items() if toy.asked} == asked
    assert found == first


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
    ids = HeldOut(path="t", sha256="", texts=((7, 8, 9, 10, 11),))
    assert cut_windows(tokenize, ids, num_tokens=150, window_size=3) == [(7, 8, 9), (10, 11)], (
        "they are sent as they are"
    )
    with pytest.raises(RecipeError, match="must hold text of some tokens; got none of two tokens"):
        cut_windows(lambda text: [], TEXT, num_tokens=150, window_size=16)


# --- divergence from the likeliest tokens, against the whole distributions --------------------------

SIZE, POSITIONS = 300, 40


def rows(logprobs: NDArray[np.float64], following: NDArray[np.int64], top: int) -> Predictions:
    """As a server answers: the likeliest `top`, and the token that follows where it is not among
    them.
    """
    found = []
    for row, after in zip(logprobs, following.tolist(), strict=True):
        names = {after, *np.argsort(-row)[:top].tolist()}
        found.append({name: float(np.float32(row[name])) for name in names})
    return tuple(found)


def nats(places: list[Apart]) -> NDArray[np.float64]:
    return np.array([place.nats for place in places])


@pytest.fixture(scope="module", params=[0.02, 0.3, 2.0])
def models(request) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]:
    """Log-probabilities of a source and of a checkpoint a little or far off, and the text."""
    rng = np.random.default_rng(0)
    logits = 3 * rng.standard_normal((POSITIONS, SIZE))
    other = logits + request.param * rng.standard_normal(logits.shape)
    return (
        log_softmax(logits, axis=1),
        log_softmax(other, axis=1),
        rng.integers(SIZE, size=POSITIONS),
    )


def test_the_whole_vocabulary_gives_the_divergence_itself(models):
    before, after, text = models
    apart = compare(rows(before, text, SIZE), rows(after, text, SIZE), is_whole=True)
    # Log-probabilities are FP32, so each is off by 2e-7 of itself at most, and they are up to 20.
    exact = rel_entr(np.exp(before), np.exp(after)).sum(axis=1)
    np.testing.assert_allclose(nats(apart), exact, atol=4e-6)
    choices = zip(before.argmax(axis=1).tolist(), after.argmax(axis=1).tolist(), strict=True)
    for place, (one, other) in zip(apart, choices, strict=True):
        assert place.is_flip == (one != other)
        assert not place.outside


def test_a_part_of_the_vocabulary_gives_a_lower_bound_that_rises_with_it(models):
    before, after, text = models
    exact = rel_entr(np.exp(before), np.exp(after)).sum(axis=1)
    last = np.zeros(POSITIONS)
    for top in (1, 2, 5, 20, 100, 250, 299):
        found = nats(compare(rows(before, text, top), rows(after, text, top), is_whole=False))
        assert (found <= exact + 4e-6).all() and (found >= last - 4e-6).all()
        last = found
    assert last.mean() == pytest.approx(exact.mean(), rel=0.01)


def test_what_is_not_compared_is_the_sources_probability_of_the_rest(models):
    before, after, text = models
    one, other = rows(before, text, 5), rows(after, text, 5)
    for at, place in enumerate(compare(one, other, is_whole=False)):
        shared = sorted(one[at].keys() & other[at].keys())
        assert place.outside == pytest.approx(1 - np.exp(before[at, shared]).sum(), abs=1e-5)


def test_a_model_is_as_close_to_itself_as_can_be(models):
    """Exactly: nothing is rounded on the way."""
    before, _, text = models
    for top in (3, SIZE):
        same = rows(before, text, top)
        apart = compare(same, same, is_whole=top == SIZE)
        assert not nats(apart).any() and not any(place.is_flip for place in apart)


def test_a_tie_is_no_flip():
    """BF16 makes logits equal, and a server names either of them first."""
    tie, one, other = (
        [dict(enumerate(np.log(each)))] for each in ((4, 4, 2), (5, 3, 2), (2, 3, 5))
    )
    found = [compare(tie, each, is_whole=True)[0].is_flip for each in (tie, one, other)]
    assert found == [False, False, True]
