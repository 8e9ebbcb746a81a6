"""Closeness as `keepmtp closeness` leaves it."""

from pathlib import Path

from data_files import table
from keepmtp.checkpoints.identity import file_sha256
from keepmtp.validate.facts.closeness import ClosenessFact, PredictedFact, WorstFact
from keepmtp.validate.facts.served import AsServed
from keepmtp.validate.measure import figures
from keepmtp.validate.measure.store import ComparedFile, ComparedHeader, ComparedWindow, Sitting

FACTS = table("helpers/facts")


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
    header = ComparedHeader(**FACTS["windows"], checkpoint_sha256=checkpoint, num=num_windows)
    path = folder / "closeness.checkpoint.jsonl"
    path.unlink(missing_ok=True)
    found = ComparedFile(path, header)
    for number in range(num_windows):
        nats = 0.008 + 0.001 * (number % 5)
        tokens = {"context": "The sky is"} | dict.fromkeys(("token", "source"), " blue")
        worst = WorstFact(window=number, at=1, nats=nats, checkpoint=" red", **tokens)
        found.add(
            ComparedWindow(
                window=number,
                nats=(nats,) * 100,
                flips=tuple(range(1 + number % 3)),
                outside=(0.01,) * 100,
                source_nll=200.0,
                checkpoint_nll=210.0,
                worst=worst,
            )
        )
    found.add(Sitting(sitting=1, as_served=as_served, reason="", seconds=12.5, repeated=0.0))
    of_source, of_checkpoint = figures.predicted(found, found)
    return ClosenessFact(
        **FACTS["closeness"],
        source=PredictedFact(path="/data/source", **of_source),
        checkpoint=PredictedFact(path="/data/checkpoint", **of_checkpoint),
        samples=path.name,
        samples_sha256=file_sha256(path),
        **figures.closeness(found),
    )
