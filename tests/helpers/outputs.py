"""Runs of the writer in processes of their own, which may be killed; for tests of one output and
several runs.

Processes come from a fork server that has imported torch and keepmtp once: a round takes a fraction
of a second.
"""

import json
import os
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from hashlib import sha256
from multiprocessing import get_context
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

SHARD_BYTES = 300_000
MODEL = "tiny-glm4-moe"


def preloaded(*modules: str) -> ForkServerContext:
    context = get_context("forkserver")
    context.set_forkserver_preload([*modules])
    return context


def forks() -> ForkServerContext:
    return preloaded("outputs", "keepmtp.pipeline", "keepmtp.quantize.write.writer")


def start(source: Path, out: Path, recipe: str, **options: float) -> ForkServerProcess:
    """Start `quantize_into`."""
    process = forks().Process(target=quantize_into, args=(source, out, recipe), kwargs=options)
    process.start()
    return process


def end(process: ForkServerProcess, timeout: float = 120) -> int | None:
    """The exit status: 0, 2 for a refusal, negative for a signal."""
    process.join(timeout)
    return process.exitcode


def killed_again_and_again(
    source: Path, out: Path, recipe: str, moments: Iterable[float]
) -> int | None:
    """Start a run and kill it after each of these seconds; then the exit status of one that is left
    alone.
    """
    for seconds in moments:
        process = start(source, out, recipe, pause=0.002)
        process.join(seconds)
        process.kill()
        process.join()
    return end(start(source, out, recipe))


def refusal(out: Path) -> str:
    path = out.with_name(f"{out.name}.refusal")
    return path.read_text() if path.is_file() else ""


def held(out: Path) -> Path:
    """The file by which a run that is held says so; it goes on when the file is gone."""
    return out.with_name(f"{out.name}.held")


def quantize_into(
    source: Path,
    out: Path,
    recipe: str,
    *,
    pause: float = 0.0,
    hold: int | None = None,
) -> None:
    """In a process of its own: the whole run, with small shards; a refusal goes to <out>.refusal.

    Args:
        source: a checkpoint of MODEL.
        out: the output.
        recipe: its name, such as MODEL.fp8, or its file.
        pause: seconds to wait after each unit.
        hold: when so many shards are whole, it is held; None: never.
    """
    import torch
    from keepmtp.checkpoints.files import partial_path
    from keepmtp.checkpoints.source import open_source
    from keepmtp.pipeline import plan_before_measuring, quantize
    from keepmtp.quantize.run.progress import RunProgress
    from keepmtp.recipes.errors import KeepMTPError
    from keepmtp.recipes.find import find_recipe

    def wait(_: object) -> None:
        time.sleep(pause)
        nonlocal hold
        wanted = hold  # the other thread may have held it meanwhile
        if wanted is not None and len([*partial_path(out).glob("*.safetensors")]) >= wanted:
            hold = None
            held(out).touch()
        while held(out).exists():
            time.sleep(0.005)

    torch.set_num_threads(1)
    decided, text = find_recipe(recipe)
    try:
        plan = plan_before_measuring(decided, open_source(source))
        plan = replace(plan, shard_bytes=SHARD_BYTES)
        progress = RunProgress(packing=lambda _: nullcontext(wait))
        quantize(plan, text, out=out, threads=2, progress=progress)
    except KeepMTPError as error:
        out.with_name(f"{out.name}.refusal").write_text(str(error))
        os._exit(2)


def digests(folder: Path) -> dict[str, str]:
    files = filter(Path.is_file, sorted(folder.rglob("*")))
    return {str(p.relative_to(folder)): sha256(p.read_bytes()).hexdigest() for p in files}


def overwrite(shard: Path, tensor: str, *, keep_times: bool = False) -> None:
    """Negate the tensor's values in place: a valid file with other weights."""
    raw = bytearray(shard.read_bytes())
    size = int.from_bytes(raw[:8], "little")
    start, stop = json.loads(raw[8 : 8 + size])[tensor]["data_offsets"]
    before = shard.stat()
    for place in range(8 + size + start + 1, 8 + size + stop, 2):  # the sign bits of BF16
        raw[place] ^= 0x80
    with open(shard, "r+b") as file:
        file.write(raw)
    if keep_times:
        os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))


def ended_at(step: int, monkeypatch: pytest.MonkeyPatch, end: Callable[[], None]) -> list[str]:
    """Call `end` at this call of the file system from now on; returns the list of the calls, which
    grows.
    """
    calls: list[str] = []

    def counted(name: str) -> Callable:
        real = getattr(os, name)

        def call(*words: Any, **named: Any) -> Any:
            calls.append(name)
            if len(calls) == step:
                end()
            return real(*words, **named)

        return call

    for name in ("link", "replace", "mkdir", "fsync", "unlink", "rmdir"):
        monkeypatch.setattr(os, name, counted(name))
    return calls
