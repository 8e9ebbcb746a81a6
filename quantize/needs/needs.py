"""What a run needs and how long it takes, on this machine or one that is named; and the refusal where it cannot fit.

In: a plan, and `--gpus` and `--gpu-memory`. Out: `Needs`, its lines for people, or a refusal with the way out.

Easy to get wrong: what is counted is within a factor (`quantize/needs/memory.py`). A run is refused only where it would
not fit even if less is needed than was counted; in between, people are warned.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict

from ...recipes.errors import RecipeError, size_in_words
from ...recipes.find import data_free_alternative
from ...recipes.schema import Calibration
from ...recipes.support import why_not_calibrated
from ..plan.plan import Plan
from .cards import CARDS, GPU, Card, card_of
from .estimate import estimate
from .free_memory import free_host_bytes
from .memory import CONTEXT_BYTES, FRAGMENTS, MAX_TOKENS, StationMemory, largest_batch_size, peak, stations
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
        return f"{self.gpus} {self.card.name}" if self.host_bytes is None else f"this machine's {self.card.name}"

    @property
    def device_bytes(self) -> int:
        """Free for tensors on one device."""
        if self.card is None:
            return self.host_bytes or 0
        return max(0, self.card.memory_bytes - CONTEXT_BYTES)


class Needs(BaseModel):
    """What a run needs; bytes, and seconds.

    Attributes:
        machine: for which machine it is said.
        backbone: why the backbone cannot be calibrated; "" if it can, None where it is not calibrated.
        mtp: why the MTP block can be neither calibrated nor measured; likewise.
        batch_size: of each process; None without calibration.
        device, device_station: the most that one GPU holds, and when; None without calibration.
        device_there: the memory of a GPU.
        host, host_station: the most that one process takes of main memory; None without calibration.
        host_there: free now; None where another machine is meant.
        states, output: on the disk: until the output is whole, and afterwards.
        seconds: None where the card's rates are not known.
        rule: what takes most of them.
    """

    model_config = ConfigDict(frozen=True)

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
    seconds: float | None = None
    rule: str = ""


def machine_of(gpus: int | None = None, gpu_memory: str | None = None, *, here: Sequence[GPU] = ()) -> Machine:
    """The machine that the options name, or this one, which has the GPUs `here`.

    Raises:
        RecipeError: `--gpus` alone on a machine without a GPU, or an unknown card.
    """
    if gpu_memory is not None:
        return Machine(card=card_of(gpu_memory), gpus=gpus or 1, host_bytes=None)
    if not here:
        if gpus is not None:
            raise RecipeError(
                "--gpus", "needs --gpu-memory where no GPU is", got=gpus, cure="Add --gpu-memory 80 or H100"
            )
        return Machine(card=None, gpus=0, host_bytes=free_host_bytes())
    known = next((card for name, card in CARDS.items() if name in here[0].name.upper()), None)
    rates = {"flops": known.flops, "bandwidth": known.bandwidth} if known else {}
    card = Card(name=here[0].name, memory_bytes=int(here[0].memory_gib * 2**30), **rates)
    return Machine(card=card, gpus=gpus or len(here), host_bytes=free_host_bytes())


def needs_of(plan: Plan, machine: Machine) -> Needs:
    """What a plan needs on a machine."""
    states, output = calibration_bytes(plan), output_bytes(plan)
    if not plan.needs_batches:
        seconds, rule = _time(plan, machine, 1)
        return Needs(machine=machine.title, states=states, output=output, seconds=seconds, rule=rule)
    family, size = plan.view.family, batch_size_on(plan, machine)
    on_device, on_host = _peaks(plan, machine, size, least=False)
    seconds, rule = _time(plan, machine, size)
    is_own_code = _calibration(plan).model_code == "checkpoint"
    backbone = "" if is_own_code else why_not_calibrated(family, plan.recipe.model)
    return Needs(
        machine=machine.title,
        backbone=backbone,
        mtp=backbone or family.no_draft,
        batch_size=size,
        device=int(on_device.device_bytes * FRAGMENTS) if machine.card else None,
        device_station=on_device.name if machine.card else "",
        device_there=machine.device_bytes if machine.card else None,
        host=on_host.host_bytes,
        host_station=on_host.name,
        host_there=machine.host_bytes,
        states=states,
        output=output,
        seconds=seconds,
        rule=rule,
    )


def batch_size_on(plan: Plan, machine: Machine) -> int:
    """The recipe's, or what a run with `batch_size: auto` would choose on this machine."""
    calibration = _calibration(plan)
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
        said += [_can("backbone", found.backbone), _can("MTP block", found.mtp)]
        if found.device is not None and found.device_there is not None:
            there = f"{size_in_words(found.device_there)} there{_fits(found.device, found.device_there)}"
            said.append(f"  GPU        {size_in_words(found.device)} at most, {found.device_station}; {there}")
        assert found.host is not None
        there = "" if found.host_there is None else f"; {size_in_words(found.host_there)} free"
        there += _fits(found.host, found.host_there) if found.host_there is not None else ""
        said.append(f"  memory     {size_in_words(found.host)} a process, {found.host_station}{there}")
    states = f"{size_in_words(found.states)} for states, " if found.states else ""
    said.append(f"  disk       {states}{size_in_words(found.output)} for the output")
    if found.seconds is not None:
        said.append(f"  time       about {_duration(found.seconds)}, without the download; {found.rule}")
    elif found.batch_size is not None:
        said.append("  time       not counted: name the card, such as --gpu-memory H100")
    return said


def refuse_too_large(plan: Plan, machine: Machine) -> None:
    """Refuse a calibration that cannot fit the memory of the machine, whatever is wrong with the count.

    Raises:
        RecipeError: names the station, and a batch size that fits or a scheme without batches.
    """
    if not plan.needs_batches:
        return
    on_device, on_host = _peaks(plan, machine, batch_size_on(plan, machine), least=True)
    if machine.card is not None and on_device.device_bytes / SURE > machine.device_bytes:
        _refuse(plan, machine, on_device, on_device.device_bytes, machine.device_bytes, "a GPU")
    if machine.host_bytes is not None and on_host.host_bytes / SURE > machine.host_bytes:
        _refuse(plan, machine, on_host, on_host.host_bytes, machine.host_bytes, "main memory")


def _refuse(plan: Plan, machine: Machine, station: StationMemory, needed: int, there: int, what: str) -> None:
    size = batch_size_on(plan, machine)
    smaller = largest_batch_size(plan, there, at_most=size)
    ways = [f"Set calibration.batch_size: {smaller}"] if 0 < smaller < size else []
    ways.append("lower calibration.sequence_length")
    ways.append(f"use --scheme {data_free_alternative(plan.recipe)}, which needs no batches")
    ways.append("or take a machine with more")
    cure = ", ".join(ways)
    raise RecipeError(
        plan.recipe.name,
        f"calibration must fit {what}: {station.name} needs {size_in_words(needed)}",
        got=size_in_words(there),
        cure=cure[0].upper() + cure[1:],
    )


def _peaks(plan: Plan, machine: Machine, batch_size: int, *, least: bool) -> tuple[StationMemory, StationMemory]:
    """The stations with most on the device and on the host; without a GPU the host holds everything."""
    found = stations(plan, batch_size=batch_size, least=least)
    if machine.card is None:
        found = [StationMemory(name=each.name, device={}, host={**each.host, **each.device}) for each in found]
    return peak(found)


def _time(plan: Plan, machine: Machine, batch_size: int) -> tuple[float | None, str]:
    if machine.card is None or not machine.card.flops:
        return None, ""
    found = estimate(plan, machine.card, gpus=machine.gpus, batch_size=batch_size)
    longest = found.ruling
    return found.seconds, f"most of it {longest.name} ({longest.station})"


def _calibration(plan: Plan) -> Calibration:
    assert plan.recipe.calibration is not None
    return plan.recipe.calibration


def _can(part: str, why_not: str | None) -> str:
    return f"  {part:<10} {'can be calibrated' if not why_not else f'cannot be calibrated: {why_not}'}"


def _fits(needed: int, there: int) -> str:
    if needed <= there:
        return ""
    return ": may not fit" if needed / SURE <= there else ": does not fit"


def _duration(seconds: float) -> str:
    minutes = max(1, round(seconds / 60))
    return f"{minutes} min" if minutes < 120 else f"{minutes / 60:.1f} h"
