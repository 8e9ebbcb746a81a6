"""Closeness as `keepmtp closeness` leaves it, from divergences and flips that a test names."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from keepmtp.checkpoints.identity import file_sha256
from keepmtp.validate.facts.closeness import ClosenessFact, PredictedFact, SourceSitting, WorstFact
from keepmtp.validate.measure import figures
from keepmtp.validate.measure.store import ComparedFile, ComparedHeader, ComparedWindow, Sitting

FILE = "closeness.checkpoint.jsonl"
VOCABULARY = 151_936


def window(number: int, nats: Sequence[float], flips: Sequence[int] = ()) -> ComparedWindow:
    at = max(range(len(nats)), key=nats.__getitem__)
    worst = WorstFact(
        window=number,
        at=at + 1,
        nats=nats[at],
        context="The sky is",
        token=" blue",
        source=" blue",
        checkpoint=" red",
    )
    return ComparedWindow(
        window=number,
        nats=tuple(nats),
        flips=tuple(flips),
        outside=(0.01,) * len(nats),
        source_nll=2.0 * len(nats),
        checkpoint_nll=2.1 * len(nats),
        worst=worst,
    )


def compared(
    folder: Path, windows: Sequence[ComparedWindow], *, checkpoint: str = "c" * 64, top: int = 512
) -> ComparedFile:
    """A file of windows in `folder`."""
    header = ComparedHeader(
        role="checkpoint",
        text_sha256="7" * 64,
        tokens=32_768,
        window=512,
        top=top,
        vocabulary=VOCABULARY,
        source_sha256="5" * 64,
        vllm="0.32.0",
        device="NVIDIA H200 (140 GiB)",
        checkpoint_sha256=checkpoint,
        windows_sha256="3" * 64,
        num=len(windows),
        num_texts=7,
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE).unlink(missing_ok=True)
    found = ComparedFile(folder / FILE, header)
    for each in windows:
        found.add(each)
    found.add(Sitting(sitting=1, as_served="native", reason="", seconds=12.5, repeated=0.0))
    return found


def spread(
    num_windows: int = 40, length: int = 100, *, nats: float = 0.01, flips: int = 2
) -> list[ComparedWindow]:
    """Windows around `nats` a token, each with a few flips more or less than `flips`."""
    factors = [0.8 + 0.4 * (number % 5) / 4 for number in range(num_windows)]
    return [
        window(number, [nats * factor] * length, range(max(0, flips + number % 3 - 1)))
        for number, factor in enumerate(factors)
    ]


def fact_of(found: ComparedFile, *, is_copy: bool = False) -> ClosenessFact:
    of_source, of_checkpoint = figures.predicted(found)
    server = figures.servers(found)[0]
    if is_copy:
        copy = {"as_served": "BF16 copy of the same weights", "reason": "no kernel"}
        server = server.model_copy(update=copy)
    server = {"servers": (server,)}
    return ClosenessFact(
        text="held_out.jsonl",
        against="None of the texts is a row of calibration.jsonl, which it was calibrated on.",
        source=PredictedFact(role="source", path="/data/source", **of_source | server),
        checkpoint=PredictedFact(
            role="checkpoint", path="/data/checkpoint", **of_checkpoint | server
        ),
        samples=found.path.name,
        samples_sha256=file_sha256(found.path),
        environment={"vllm": "0.32.0", "device": "NVIDIA H200 (140 GiB)", "words": ""},
        **figures.closeness(found),
    )


def hostile_closeness(word: str) -> ClosenessFact:
    """Every string that a stranger's text or checkpoint may choose is `word`."""
    with TemporaryDirectory() as folder:
        fact = closeness(Path(folder))
    names = ("context", "token", "source", "checkpoint")
    worst = tuple(each.model_copy(update=dict.fromkeys(names, word)) for each in fact.worst)
    server = SourceSitting(
        as_served="BF16 copy of the same weights", reason=word, seconds=1.0, repeated=0.5
    )
    models = {
        model.role: model.model_copy(update={"path": word, "servers": (server,)})
        for model in fact.predicted
    }
    changed = {
        "text": word,
        "against": word,
        "samples": word,
        "worst": worst,
        "environment": {word: word},
    }
    return fact.model_copy(update=changed | models)


def closeness(folder: Path, *, checkpoint: str = "c" * 64, nats: float = 0.01) -> ClosenessFact:
    """A fact with its file of windows."""
    return fact_of(compared(folder, spread(nats=nats), checkpoint=checkpoint))
