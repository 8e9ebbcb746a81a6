"""How many processes share a run, and which one this is, as torchrun says it.

In: the environment. Out: a `ProcessPlace`. torch is not imported, so the command line can ask at
once.

Easy to get wrong: a stray RANK is no torchrun; WORLD_SIZE says that there are others.

Source: PyTorch 2.13 distributed/run.py.
"""

import os
from typing import TYPE_CHECKING

from ...recipes.errors import RecipeError, counted
from ...recipes.frozen import frozen

if TYPE_CHECKING:  # it imports pydantic, which a progress bar does not need
    from ...recipes.schema import Calibration


@frozen
class ProcessPlace:
    """This process among all."""

    # Its number over all nodes.
    rank: int = 0
    # Processes in all.
    size: int = 1
    # Its number on this node.
    local: int = 0
    # Processes on this node.
    local_size: int = 1


def place_of_process() -> ProcessPlace:
    """The place of this process; alone where torchrun did not start it."""

    def number(name: str, default: int) -> int:
        return int(os.environ.get(name) or default)

    size = number("WORLD_SIZE", 1)
    if size == 1:
        return ProcessPlace()
    return ProcessPlace(
        rank=number("RANK", 0),
        size=size,
        local=number("LOCAL_RANK", 0),
        local_size=number("LOCAL_WORLD_SIZE", size),
    )


def refuse_processes(calibration: "Calibration", size: int, where: str) -> None:
    """Refuse more processes than there are sequences, or than the algorithm can use: one would have
    nothing to do.

    Source of what modelopt shares: nvidia-modelopt 0.47.0 local_hessian_calibrate ("Treat
    local_hessian as single-rank for now").

    Raises:
        RecipeError: says how many there may be.
    """
    if calibration.samples < size:
        got = calibration.samples
        raise RecipeError(
            where,
            "every process must have a sequence of calibration text",
            got=f"{counted(got, 'sample')} for {size} processes",
            cure="Raise calibration.samples, or start fewer processes",
        )
    # modelopt sums its Hessians over none; auto-round's own processes each keep what was best on
    # their own text.
    instead = {"autoround": "gptq", "local-hessian": "mse"}.get(calibration.algorithm)
    if instead and size > 1:
        raise RecipeError(
            where,
            f"algorithm: {calibration.algorithm} must run in one process",
            got=f"{size} processes",
            cure=f"Start one, or set calibration.algorithm: {instead}",
        )
