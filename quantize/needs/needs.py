"""What a run needs, on this machine or one that is named; and the refusal where it cannot fit.

In: a plan, and `--gpus` and `--gpu-memory`. Out: `Needs`, its lines for people, or a refusal with
the way out.

Easy to get wrong: what is counted is within a factor (`memory.py`). A run is refused only where it
would not fit even if less is needed than was counted; in between, people are warned.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...recipes.errors import RecipeError, size_in_words
from ...recipes.find import data_free_alternative
from ...recipes.support import why_not_calibrated
from ..plan.plan import Plan
from .cards import GPU, Card, card_of
from .free_memory import free_host_bytes
from .memory import (
    CONTEXT_BYTES,
    FRAGMENTS,
    MAX_TOKENS,
    StationMemory,
    largest_batch_size,
    peak,
    stations,
)
from .room import calibration_bytes, output_bytes

SURE = 1.25
"""What is counted may be so many times what is needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Where a run would be.

    Attributes:
        card: of each GPU; None where the CPU calibrates.
        gpus: how many.
        host_bytes: free main memory; None where another machine is meant.
    """

    card: Card | None
    gpus: int
    host_bytes: int | None

    @property
    def title(self) -> str:
        """For people."""
        if self.card is None:
            return "this machine's CPU"
        if self.host_bytes is None:
            return f"{self.gpus} {self.card.name}"
        return f"this machine's {self.card.name}"

    @property
    def device_bytes(self) -> int:
        """Free for tensors on one device."""
        if self.card is None:
            return self.host_bytes or 0
        return max(0, self.card.memory_bytes - CONTEXT_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a run needs, in bytes.

    Attributes:
        machine: for which machine it is said.
        backbone: why the backbone cannot be calibrated; "" if it can, None where it is not
            calibrated.
        mtp: why the MTP block can be neither calibrated nor measured; likewise.
        batch_size: of each process; None without calibration.
        device, device_station: the most that one GPU holds, and when; None without calibration.
        device_there: the memory of a GPU.
        host, host_station: the most that one process takes of main memory; None without
            calibration.
        host_there: free now; None where another machine is meant.
        states, output: on the disk: until the output is whole, and afterwards.
    """

    machine: str
    backbone: str | None = None
    mtp: str | None = None
    batch_size: int | None = None
    device: int | None = None
    device_station: str = ""
    device_there: int | None = None
    host: int | None = None
    host_station: str = ""
    host_there: int | None = None
    states: int
    output: int


def machine_of(
    gpus: int | None = None, gpu_memory: str | None = None, *, here: Sequence[GPU] = ()
) -> Machine:
    """The machine that the options name, or this one, which has the GPUs `here`.

    Raises:
        RecipeError: `--gpus` alone on a machine without a GPU, or an unknown card.
    """
    if gpu_memory is not None:
        return Machine(card=card_of(gpu_memory), gpus=gpus or 1, host_bytes=None)
    if here:
        card = Card(name=here[0].name, memory_bytes=int(here[0].memory_gib * 2**30))
        return Machine(card=card, gpus=gpus or len(here), host_bytes=free_host_bytes())
    if gpus is not None:
        raise RecipeError(
            "--gpus",
            "needs --gpu-memory where no GPU is",
            got=gpus,
            cure="Add --gpu-memory 80 or H100",
        )
    return Machine(card=None, gpus=0, host_bytes=free_host_bytes())


def needs_of(plan: Plan, machine: Machine) -> Needs:
    """What a plan needs on a machine."""
    found = Needs(machine=machine.title, states=calibration_bytes(plan), output=output_bytes(plan))
    calibration = plan.recipe.calibration
    if not plan.needs_batches or calibration is None:
        return found
    family, size = plan.view.family, batch_size_on(plan, machine)
    on_device, on_host = _peaks(plan, machine, size, least=False)
    backbone = ""
    if calibration.model_code != "checkpoint":
        backbone = why_not_calibrated(family, plan.recipe.model)
    on_gpu = {}
    if machine.card is not None:
        on_gpu = {
            "device": int(on_device.device_bytes * FRAGMENTS),
            "device_station": on_device.name,
            "device_there": machine.device_bytes,
        }
    return replace(
        found,
        backbone=backbone,
        mtp=backbone or family.no_draft,
        batch_size=size,
        host=on_host.host_bytes,
        host_station=on_host.name,
        host_there=machine.host_bytes,
        **on_gpu,
    )


def batch_size_on(plan: Plan, machine: Machine) -> int:
    """The recipe's, or what a run with `batch_size: auto` would choose on this machine."""
    calibration = plan.recipe.calibration
    assert calibration is not None
    size: object = calibration.batch_size
    if isinstance(size, int):
        return size
    rows = max(1, MAX_TOKENS // calibration.sequence_length)
    rows = min(rows, -(-calibration.samples // max(1, machine.gpus)))
    return max(1, largest_batch_size(plan, machine.device_bytes, at_most=rows))


def lines(found: Needs) -> list[str]:
    """For people, each shorter than a terminal is wide."""
    batches = "" if found.batch_size is None else f", in batches of {found.batch_size}"
    said = [f"Needs, counted for {found.machine}{batches}:"]
    if found.batch_size is not None:
        for part, why_not in (("backbone", found.backbone), ("MTP block", found.mtp)):
            said.append(
                f"  {part:<10} "
                f"{f'cannot be calibrated: {why_not}' if why_not else 'can be calibrated'}"
            )
    if found.device is not None and found.device_there is not None:
        there = (
            f"{size_in_words(found.device_there)} there{_fits(found.device, found.device_there)}"
        )
        said.append(
            f"  GPU        {size_in_words(found.device)} at most, {found.device_station}; {there}"
        )
    if found.host is not None:
        line = f"  memory     {size_in_words(found.host)} a process, {found.host_station}"
        if found.host_there is not None:
            line += f"; {size_in_words(found.host_there)} free{_fits(found.host, found.host_there)}"
        said.append(line)
    states = f"{size_in_words(found.states)} for states, " if found.states else ""
    return [*said, f"  disk       {states}{size_in_words(found.output)} for the output"]


def refuse_too_large(plan: Plan, machine: Machine) -> None:
    """Refuse a calibration that cannot fit the memory of the machine, whatever is wrong with the
    count.

    Raises:
        RecipeError: names the station, and a batch size that fits or a scheme without batches.
    """
    if not plan.needs_batches:
        return
    size = batch_size_on(plan, machine)
    on_device, on_host = _peaks(plan, machine, size, least=True)
    places = [("main memory", on_host.name, on_host.host_bytes, machine.host_bytes)]
    if machine.card is not None:
        places.insert(0, ("a GPU", on_device.name, on_device.device_bytes, machine.device_bytes))
    for what, station, needed, there in places:
        if there is None or needed / SURE <= there:
            continue
        smaller = largest_batch_size(plan, there, at_most=size)
        cure = "Lower calibration.sequence_length"
        if 0 < smaller < size:
            cure = f"Set calibration.batch_size: {smaller}, lower calibration.sequence_length"
        instead = f"use --scheme {data_free_alternative(plan.recipe)}, which needs no batches"
        raise RecipeError(
            plan.recipe.name,
            f"calibration must fit {what}: {station} needs {size_in_words(needed)}",
            got=size_in_words(there),
            cure=f"{cure}, {instead}, or take a machine with more",
        )


def _peaks(
    plan: Plan, machine: Machine, batch_size: int, *, least: bool
) -> tuple[StationMemory, StationMemory]:
    """The stations with most on the device and on the host; without a GPU the host holds
    everything.
    """
    found = stations(plan, batch_size=batch_size, least=least)
    if machine.card is None:
        found = [
            StationMemory(name=each.name, device={}, host={**each.host, **each.device})
            for each in found
        ]
    return peak(found)


def _fits(needed: int, there: int) -> str:
    if needed <= there:
        return ""
    return ": may not fit" if needed / SURE <= there else ": does not fit"
