"""What stations find, as they leave it: lossless, closeness, and a speed matrix as
`keepmtp bench` would find it, tokens a second by k and load, from counts and seconds.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from data_files import table
from keepmtp.checkpoints.identity import file_sha256
from keepmtp.validate.facts.benched import BenchCell, Benched, BenchFact, Repetition
from keepmtp.validate.facts.closeness import ClosenessFact, PredictedFact
from keepmtp.validate.facts.lossless import AskedFact, AskedModel, LosslessFact
from keepmtp.validate.facts.rows import Arm
from keepmtp.validate.facts.served import AsServed
from keepmtp.validate.measure.closeness import compared
from keepmtp.validate.measure.store import ComparedFile, ComparedWindow, Header, Sitting

FACTS = table("helpers/facts")
_ASKED = ("text_sha256", "window", "top", "vocabulary")


def closeness(
    folder: Path,
    *,
    checkpoint: str = "c" * 64,
    num_windows: int = 40,
    as_served: AsServed = "native",
) -> ClosenessFact:
    """A fact and its file of windows, which are around 0.01 nats a token, each with one to three
    flips.
    """
    header = Header(**FACTS["windows"], checkpoint_sha256=checkpoint, num=num_windows)
    path = folder / "closeness.checkpoint.jsonl"
    path.unlink(missing_ok=True)
    found = ComparedFile(path, header)
    for number in range(num_windows):
        nats = 0.008 + 0.001 * (number % 5)
        found.add(
            ComparedWindow(
                window=number,
                nats=(nats,) * 100,
                flips=tuple(range(1 + number % 3)),
                outside=(0.01,) * 100,
                source_nll=200.0,
                checkpoint_nll=210.0,
            )
        )
    found.add(Sitting(sitting=1, as_served=as_served, reason=""))
    one = {"as_served": as_served, "reason": ""}
    before = {"sha256": FACTS["windows"]["source_sha256"], "perplexity": math.exp(2.0)}
    after = {"sha256": checkpoint, "perplexity": math.exp(2.1)}
    return ClosenessFact(
        **FACTS["closeness"],
        source=PredictedFact(role="source", path="/data/source", **one, **before),
        checkpoint=PredictedFact(role="checkpoint", path="/data/checkpoint", **one, **after),
        samples=path.name,
        samples_sha256=file_sha256(path),
        **{name: FACTS["windows"][name] for name in _ASKED},
        **compared(found.in_order()),
    )


def lossless(*broken: tuple[str, ...]) -> LosslessFact:
    """Of the source with MTP off, and of the checkpoint with MTP off and on, asked in two ways."""
    asked = []
    for k, names in zip((0, 0, 1), broken, strict=True):
        for way, seen in (("one at a time", {}), ("32 at once", {"characters": names})):
            asked.append(AskedFact(k=k, way=way, num=56, num_compared=56, num_changed=0, seen=seen))
    how = {"path": "/data/x", "as_served": "native", "reason": ""}
    return LosslessFact(
        source=AskedModel(role="source", asked=tuple(asked[:2]), **how),
        checkpoint=AskedModel(role="checkpoint", asked=tuple(asked[2:]), **how),
        environment={"vllm": "0.32.0", "device": "H200"},
    )


_TOKENS = 10_000
# What publishers of DeepSeek-V4-Flash print by hand, k = 0 to 4 in one thread.
FLASH = {0: 105.9, 1: 152.7, 2: 179.9, 3: 193.0, 4: 162.1}


def repetition(k: int, rate: float, *, number: int = 0, share: float = 0.9) -> Repetition:
    """So many tokens a second; each position accepts `share` of what the one before accepted."""
    kept = [round(4000 * share**position) for position in range(1, k + 1)]
    return Repetition(
        number=number,
        seconds=_TOKENS / rate,
        requests=40,
        input_tokens=4 * _TOKENS,
        output_tokens=_TOKENS,
        first_token_ms=20.0,
        per_token_ms=1000 / rate,
        drafts=4000 if k else 0,
        draft_tokens=4000 * k,
        accepted_tokens=sum(kept),
        accepted_per_position=tuple(kept),
    )


def cell(k: int, rates: Sequence[float], *, concurrency: int = 1, share: float = 0.9) -> BenchCell:
    repetitions = tuple(
        repetition(k, rate, number=number, share=share) for number, rate in enumerate(rates)
    )
    return BenchCell(k=k, concurrency=concurrency, repetitions=repetitions)


def benched(
    rates: Mapping[int, float] = FLASH,
    *,
    role: Arm = "checkpoint",
    spread: float = 0.02,
    sha256: str = "0" * 64,
) -> Benched:
    """Three repetitions for each k, alone and with eight at once, where drafting costs more than it
    saves.
    """
    loads = {1: rates, 8: {k: 880 - 100 * k if k else 900 for k in rates}}
    around = (1 - spread, 1.0, 1 + spread)
    return Benched(
        role=role,
        path=f"/data/{role}",
        sha256=sha256,
        **FACTS["benched"],
        cells=tuple(
            cell(k, [rate * each for each in around], concurrency=concurrency)
            for concurrency, load in loads.items()
            for k, rate in load.items()
        ),
    )


def bench_fact(*, with_source: bool = True, sha256: str = "0" * 64) -> BenchFact:
    return BenchFact(
        checkpoint=benched(sha256=sha256),
        source=benched({k: 0.6 * rate for k, rate in FLASH.items()}, role="source")
        if with_source
        else None,
        **FACTS["bench"],
    )
