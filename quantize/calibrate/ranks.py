"""Which of several processes this is: one on its own, or one of those that torchrun started.

In: torchrun's environment. Out: a `Ranks`. Every rank calibrates with its share of the batches; llm-compressor's
modifiers sum up over the ranks (NCCL on GPUs, gloo on CPUs).

Easy to get wrong: a rank that dies must not leave the others waiting for it. Their connections to it break, or torchrun
ends them; either way they end with a sentence that says why. A wait longer than `TIMEOUT` ends them too, also on other
nodes.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType

import torch
import torch.distributed as dist

from ...recipes.errors import RecipeError

TIMEOUT = timedelta(hours=2)  # a GPTQ layer of a large model may keep one rank busy for long
_RESUME = "Read what the other processes said; the same command goes on where this run stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This process among `size`.

    Attributes:
        rank: counted over all nodes.
        size: processes in all; 1 without torchrun.
        device: this process's GPU, or the CPU.
        local_size: processes on this node, who share its cores.
    """

    rank: int
    size: int
    device: torch.device
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

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The same values summed over the ranks, on the CPU."""
        if self.size == 1:
            return values.cpu()
        total = values.to(self.device)
        dist.all_reduce(total)
        return total.cpu()


def has_others() -> bool:
    """Whether this process is one of several that have joined."""
    return dist.is_initialized() and dist.get_world_size() > 1


@contextmanager
def joined() -> Iterator[Ranks]:
    """The ranks of this run: those torchrun started, or this process alone.

    Raises:
        RecipeError: a node has fewer GPUs than processes; inside, wherever another process is gone.
    """
    ranks = _ranks()
    if ranks.device.type == "cuda":
        torch.cuda.set_device(ranks.device)
    if ranks.size == 1:
        yield ranks
        return
    with _ended_by_torchrun():
        try:
            dist.init_process_group("nccl" if ranks.device.type == "cuda" else "gloo", timeout=TIMEOUT)
            yield ranks
        except RuntimeError as error:
            if not _is_about_peers(error):
                raise
            first_line = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise RecipeError(
                "torchrun",
                "all processes must stay until the end",
                got=f"no answer from another ({first_line})",
                cure=_RESUME,
            ) from error
        # Not after an error: leaving a group in good order needs all of its members.
        dist.destroy_process_group()


def _ranks() -> Ranks:
    rank, size, local, local_size = (
        int(os.environ.get(name, default))
        for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1"))
    )
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", local)
        if local >= torch.cuda.device_count():
            raise RecipeError(
                f"rank {rank} of {size}",
                "every process must have a GPU of its own",
                got=f"{local_size} processes for {torch.cuda.device_count()} GPUs",
                cure="Lower NPROC",
            )
    return Ranks(rank=rank, size=size, device=device, local_size=local_size)


def _is_about_peers(error: RuntimeError) -> bool:
    """Whether a collective failed; gloo raises plain RuntimeErrors that name its own source files."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)


@contextmanager
def _ended_by_torchrun() -> Iterator[None]:
    """Turns the SIGTERM that torchrun sends to the other processes, when one has ended, into a refusal."""

    def say(_number: int, _frame: FrameType | None) -> None:
        raise RecipeError(
            "torchrun",
            "all processes must stay until the end",
            got="SIGTERM, which it sends when one of them has ended",
            cure=_RESUME,
        )

    if threading.current_thread() is not threading.main_thread():  # signals are the main thread's
        yield
        return
    before = signal.signal(signal.SIGTERM, say)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
