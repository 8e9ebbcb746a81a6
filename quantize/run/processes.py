"""How many processes share a run, and which one this is: as torchrun says it, or SLURM's srun.

In: the environment. Out: a `ProcessPlace`. torch is not imported, so the command line can ask at
once.

Easy to get wrong: an sbatch script itself has SLURM_NTASKS too, and so has a shell under `srun
--pty`; a process in them is alone. So SLURM's names count only in a step of srun, and where
MASTER_ADDR says where the processes meet. A person sets that for this.

Source: PyTorch 2.13 distributed/run.py (names of torchrun); srun(1), "OUTPUT ENVIRONMENT
VARIABLES".
"""

import os
import re
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
    # The program that started them.
    launcher: str = "torchrun"


def place_of_process() -> ProcessPlace:
    """The place of this process; alone where no launcher says otherwise."""

    def number(name: str, default: int) -> int:
        return int(os.environ.get(name) or default)

    size = number("WORLD_SIZE", 1)
    rank = number("RANK", 0)
    if size > 1:
        local = number("LOCAL_RANK", 0)
        return ProcessPlace(
            rank=rank, size=size, local=local, local_size=number("LOCAL_WORLD_SIZE", size)
        )
    size = number("SLURM_NTASKS", 1)
    is_step = "SLURM_STEP_ID" in os.environ
    if size == 1 or "RANK" in os.environ or not (os.environ.get("MASTER_ADDR") and is_step):
        return ProcessPlace()
    counts: list[
        int
    ] = []  # from `8(x2),4`: eight tasks on each of the first two nodes, four on the third
    tasks = os.environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    for count, repeat in re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks):
        counts += [int(count)] * int(repeat or 1)
    counts = counts[number("SLURM_NODEID", 0) :] or [size]
    rank = number("SLURM_PROCID", 0)
    local = number("SLURM_LOCALID", 0)
    return ProcessPlace(rank=rank, size=size, local=local, local_size=counts[0], launcher="srun")


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
