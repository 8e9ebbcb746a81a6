"""What a run needs, on this machine or one that is named; and the refusal where it cannot fit.

In: a plan, and `--gpu-memory`. Out: `Needs`, its lines for people, or a refusal with the way out.

Easy to get wrong: what is counted is within a factor (`memory.py`). A run is refused only where it
would not fit even if less is needed than was counted; in between, people are warned.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ...recipes.errors import RecipeError, size_in_words
from ...recipes.families import why_not_calibrated
from ...recipes.frozen import frozen
from ..plan.plan import Plan
from .cards import GPU, card_of
from .memory import CONTEXT_BYTES, free_host_bytes, stations
from .room import calibration_bytes, output_bytes

# What is counted may be so many times what is needed.
SURE = 1.3


@frozen
class Machine:
    """Where a run would be."""

    # What people read of it.
    title: str
    # Bytes that are free for tensors on one GPU; None without one, where the CPU calibrates.
    device_bytes: int | None
    # Bytes of free main memory; None where another machine is meant.
    host_bytes: int | None
    # Bytes of one GPU, free or not; 0 without one.
    memory: int = 0


@dataclass(slots=True, kw_only=True)
class Needs:
    """What a run needs, in bytes."""

    # The machine that this is said of.
    machine: str
    # Why the backbone cannot be calibrated; "" if it can, None where it is not calibrated.
    backbone: str | None = None
    # Why the MTP block can be neither calibrated nor measured; likewise.
    mtp: str | None = None
    # Sequences in a batch of each process; None without calibration.
    batch_size: int | None = None
    # The most that one GPU holds, and when; None without calibration.
    device: int | None = None
    device_station: str = ""
    # The memory of a GPU.
    device_there: int | None = None
    # The most that one process takes of main memory; None without calibration.
    host: int | None = None
    host_station: str = ""
    # Main memory that is free now; None where another machine is meant.
    host_there: int | None = None
    # Bytes on the disk: until the output is whole, and afterwards.
    states: int
    output: int


def machine_of(gpu_memory: str | None = None, *, here: Sequence[GPU] = ()) -> Machine:
    """A machine with the card that is named, or this one, which has the GPUs `here`.

    Raises:
        RecipeError: an unknown card.
    """
    if gpu_memory is not None:
        title, size = card_of(gpu_memory)
        free = None  # of another machine it is not known
    else:
        free = free_host_bytes()
        if not here:
            return Machine(title="this machine's CPU", device_bytes=None, host_bytes=free)
        title = f"this machine's {here[0].name}"
        size = int(here[0].memory_gib * 2**30)
    device = max(0, size - CONTEXT_BYTES)
    return Machine(title=title, device_bytes=device, host_bytes=free, memory=size)


def needs_of(plan: Plan, machine: Machine) -> Needs:
    """What a plan needs on a machine."""
    needs = Needs(machine=machine.title, states=calibration_bytes(plan), output=output_bytes(plan))
    calibration = plan.recipe.calibration
    family = plan.view.family
    if not plan.needs_batches or calibration is None:
        return needs
    needs.backbone = ""
    if calibration.model_code != "checkpoint":
        needs.backbone = why_not_calibrated(family, plan.recipe.model)
    needs.mtp = needs.backbone or family.no_draft
    needs.batch_size = calibration.batch_size
    needs.host_there = machine.host_bytes
    needs.device_there = machine.device_bytes
    needs.host = 0
    for station in stations(plan):
        device = station.device_bytes
        host = station.host_bytes
        if machine.device_bytes is None:
            host += device  # without a GPU main memory holds everything
        elif device > (needs.device or 0):
            needs.device = device
            needs.device_station = station.name
        if host > needs.host:
            needs.host = host
            needs.host_station = station.name
    return needs


def lines(needs: Needs) -> list[str]:
    """For people, each shorter than a terminal is wide."""
    batches = ""
    if needs.batch_size is not None:
        batches = f", in batches of {needs.batch_size}"
    said = [f"Needs, counted for {needs.machine}{batches}:"]
    for part, why_not in (("backbone", needs.backbone), ("MTP block", needs.mtp)):
        if why_not:
            said.append(f"  {part:<10} cannot be calibrated: {why_not}")
        elif why_not is not None:
            said.append(f"  {part:<10} can be calibrated")
    for what, needed, station, there, called in (
        (
            "GPU       ",
            needs.device,
            f"at most, {needs.device_station}",
            needs.device_there,
            "there",
        ),
        ("memory    ", needs.host, f"a process, {needs.host_station}", needs.host_there, "free"),
    ):
        if needed is None:
            continue
        line = f"  {what} {size_in_words(needed)} {station}"
        if there is not None:
            line += f"; {size_in_words(there)} {called}"
            if needed / SURE > there:
                line += ": does not fit"
            elif needed > there:
                line += ": may not fit"
        said.append(line)
    disk = f"{size_in_words(needs.output)} for the output"
    if needs.states:
        disk = f"{size_in_words(needs.states)} for states, {disk}"
    return [*said, f"  disk       {disk}"]


def refuse_too_large(plan: Plan, machine: Machine) -> None:
    """Refuse a calibration that cannot fit the memory of the machine, whatever is wrong with the
    count.

    Raises:
        RecipeError: names the station.
    """
    needs = needs_of(plan, machine)
    for what, station, needed, there in (
        ("a GPU", needs.device_station, needs.device, needs.device_there),
        ("main memory", needs.host_station, needs.host, needs.host_there),
    ):
        if needed is None or there is None or needed / SURE <= there:
            continue
        raise RecipeError(
            plan.recipe.name,
            f"calibration must fit {what}: {station} needs {size_in_words(needed)}",
            got=size_in_words(there),
            cure="Lower calibration.batch_size or calibration.sequence_length, use a variant "
            "without batches (`keepmtp ls`), or take a machine with more",
        )
