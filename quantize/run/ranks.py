"""The processes of a run: one on its own, or those that torchrun started, each with its device and
its share.

In: the place of this process (`processes.py`). Out: a `Ranks`. Every rank calibrates with its share
of the sequences; llm-compressor's modifiers sum up over the ranks (NCCL on GPUs, gloo on CPUs).

Easy to get wrong: a rank that dies must not leave the others waiting for it. Their connections to
it break, or the launcher ends them; either way they end with a sentence that says why. So the ranks
wait for each other over gloo, which notices a broken connection at once, also where tensors go over
NCCL. A wait longer than `TIMEOUT` ends them too.

A GPU that fails leaves errors of many classes, and nothing more can be computed on it by this
process.
"""

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from math import ceil
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ...recipes.errors import KeepMTPError, RecipeError, counted
from ...recipes.frozen import frozen
from .processes import ProcessPlace, place_of_process

TIMEOUT = timedelta(hours=2)  # a GPTQ layer of a large model may keep one rank busy for long
_LOST_DEVICE = (
    "CUDA error",
    "CUDA driver error",
    "CUDA-capable device",
    "uncorrectable ECC",
    "CUBLAS_STATUS_",
)
_T = TypeVar("_T")


@frozen
class Ranks:
    """This process among `size`."""

    # Its number over all nodes.
    rank: int
    # Processes in all; 1 without a launcher.
    size: int
    # This process's GPU, or the CPU.
    device: torch.device
    # Processes on this node, who share its cores.
    local_size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this process does what is done once: it writes files and prints."""
        return self.rank == 0

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size}"

    def wait(self) -> None:
        """Returns when every rank has called it."""
        if self.size > 1:
            dist.barrier()

    def share(self, num_rows: int, batch_size: int) -> range:
        """This rank's rows of so many: whole batches where every rank gets one, else as many rows
        as the others.

        Whole batches are those of a single process, so that each computes what it would compute
        there.
        """
        unit = batch_size
        if ceil(num_rows / batch_size) < self.size:
            unit = 1
        num_units = ceil(num_rows / unit)
        first = num_units * self.rank // self.size * unit
        end = num_units * (self.rank + 1) // self.size * unit
        return range(min(first, num_rows), min(end, num_rows))

    def of_first(self, find: Callable[[], _T]) -> _T:
        """What the first rank finds, given to all; what it refuses, all refuse."""
        if self.size == 1:
            return find()
        sent: list[Any] = [None, None]
        if self.is_first:
            try:
                sent[0] = find()
            except KeepMTPError as error:
                sent[1] = type(error), str(error.where), error.rule, str(error.got), error.cure
        dist.broadcast_object_list(sent, src=0)
        value, refused = sent
        if refused is not None:
            refusal, where, rule, got, cure = refused
            raise refusal(where, rule, got=got, cure=cure)
        return value

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The same values summed over the ranks, on the CPU."""
        total = values.to(self.device, copy=True)
        if self.size > 1:
            dist.all_reduce(total)
        return total.cpu()


def has_others() -> bool:
    """Whether this process is one of several that have joined."""
    return dist.is_initialized() and dist.get_world_size() > 1


def gathered(value: _T) -> list[_T]:
    """What each rank gives, in their order; all of them call this."""
    if not has_others():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@contextmanager
def joined() -> Iterator[Ranks]:
    """The ranks of this run: those a launcher started, or this process alone.

    Raises:
        RecipeError: a node has fewer GPUs than processes; inside, wherever another process or this
            one's GPU is gone.
    """
    # PyTorch reads it when it starts CUDA. Segments that grow leave no holes that nothing fits; who
    # chose a setting keeps it. On a CPU nobody reads it.
    if "ALLOC_CONF" not in " ".join(os.environ):
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    place = place_of_process()
    ranks = Ranks(
        rank=place.rank, size=place.size, device=_device_of(place), local_size=place.local_size
    )
    if ranks.device.type == "cuda":
        torch.cuda.set_device(ranks.device)
    with naming_lost_device(ranks):
        if ranks.size == 1:
            yield ranks
            return
        with _ended_by_launcher():
            backend = "gloo"
            if ranks.device.type == "cuda":
                backend = "cpu:gloo,cuda:nccl"
            dist.init_process_group(
                backend, rank=place.rank, world_size=place.size, timeout=TIMEOUT
            )
            yield ranks
        # Not after an error: leaving a group in good order needs all of its members.
        dist.destroy_process_group()


@contextmanager
def naming_lost_device(ranks: Ranks) -> Iterator[None]:
    """Turns what is raised where another process is gone, or where a GPU has failed, into a
    refusal.

    What is done is on the disk. gloo raises plain RuntimeErrors that name its own source files.
    """
    try:
        yield
    except RuntimeError as error:
        line = next(iter(str(error).strip().splitlines()), type(error).__name__)
        if isinstance(error, dist.DistError) or "gloo" in str(error):
            raise _peers_must_stay(f"no answer from another ({line})") from error
        is_named = any(word in str(error) for word in _LOST_DEVICE)
        is_lost = is_named or isinstance(error, torch.AcceleratorError)
        if not is_lost or isinstance(error, torch.OutOfMemoryError):
            raise  # a full device is another matter
        raise RecipeError(
            f"{ranks.device} of {ranks} on {socket.gethostname()}",
            "the GPU must work until the end",
            got=line,
            cure="Look at `nvidia-smi` and at `dmesg` for Xid errors; the same command goes on "
            "where this run stopped, also with fewer processes if the algorithm is minmax or "
            "smoothquant",
        ) from error


def _peers_must_stay(got: str) -> RecipeError:
    return RecipeError(
        "torchrun",
        "all processes must stay until the end",
        got=got,
        cure="Read what the other processes said; the same command goes on where this run stopped",
    )


def _device_of(place: ProcessPlace) -> torch.device:
    """A GPU of its own for each process on a node, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    num_gpus = torch.cuda.device_count()
    if place.local < num_gpus:
        return torch.device("cuda", place.local)
    raise RecipeError(
        f"rank {place.rank} of {place.size}",
        "every process must have a GPU of its own",
        got=f"{place.local_size} processes for {counted(num_gpus, 'GPU')}",
        cure="Lower NPROC, or show them more GPUs",
    )


@contextmanager
def _ended_by_launcher() -> Iterator[None]:
    """Turns the SIGTERM that a launcher sends to the other processes, when one has ended, into a
    refusal.
    """

    def say(*_: object) -> None:
        raise _peers_must_stay("SIGTERM, which it sends when one of them has ended")

    if threading.current_thread() is not threading.main_thread():  # signals are the main thread's
        yield
        return
    before = signal.signal(signal.SIGTERM, say)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
