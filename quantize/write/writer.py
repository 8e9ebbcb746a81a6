"""Writes the shards that a plan describes, from its source.

In: a plan over a local source, and the statistics of calibration if it needs them. Out: the shards,
and the other files of `output.py`, in a folder that gets its final name only when it is whole. What
calibration gave is copied; everything else is packed from the source.

The plan fixes every output's name, dtype and shape, so a shard's header is written first, and each
tensor directly at its place. Memory holds only the tensors that are being written, whatever the
size of shards. A shard gets its name when it is complete. After a kill, the next run keeps the
complete ones, once their hashes are compared (`finished.py`), and writes the others again, with the
same bytes.

Easy to get wrong: safetensors allows any offset for a tensor, but readers map the file, so wider
dtypes come first.
"""

import hashlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import torch

from ...checkpoints.files import complete, naming_file, partial_path, write_at
from ...checkpoints.safetensors_file import Entry, FileLayout, lay_out
from ...checkpoints.stored import scale_of, weight_of
from ...checkpoints.values import TORCH_DTYPES, changed, read_bytes, read_tensor
from ...recipes.errors import RecipeError
from ...recipes.family import HFName
from ..pack.unit import packed_groups
from ..pack.weights import load, parts, separate
from ..plan.plan import Output, Plan, Shard, TensorPlan
from ..run.ranks import Ranks
from ..run.statistics import Statistics, refuse_statistics
from .finished import fault_of, finished_path, remember, written_sum
from .output import finish

_log = logging.getLogger(__name__)
_COPY_BYTES = 32 * 2**20
Progress = Callable[[int], None]
"""Called with the number of source bytes done since the last call; from several threads."""


def write(
    plan: Plan,
    partial: Path,
    *,
    recipe_text: str,
    threads: int,
    progress: Progress | None = None,
    statistics: Statistics | None = None,
    calibration: Mapping[str, Any] | None = None,
    ranks: Ranks | None = None,
) -> None:
    """Write everything the plan says, resuming what an earlier run left.

    Args:
        plan: a plan over a local source, which `output.refuse_output` let pass.
        partial: the folder, from `output.claim`; `output.publish` gives it its final name.
        recipe_text: the recipe file, carried over verbatim.
        threads: shards written at the same time on this machine, each by one thread on one device.
        progress: called with source bytes done.
        statistics: what calibration gave; None for a plan without calibrated tensors.
        calibration: the provenance's account of it.
        ranks: processes that share the work and a file system; each calls this and returns when all
            is written.

    Raises:
        RecipeError: the plan needs statistics, and there are none.
        CheckpointError: see `refuse_statistics`, before a byte is written; a source weight holds
            NaN or infinity, or a file ends early.
    """
    refuse_statistics(plan, statistics)
    ranks = ranks or Ranks(rank=0, size=1, device=torch.device("cpu"))
    write_shards(
        plan, partial, threads=threads, progress=progress, statistics=statistics, ranks=ranks
    )
    ranks.wait()
    if ranks.is_first:
        finish(plan, partial, recipe_text=recipe_text, calibration=calibration)
    ranks.wait()
    own = plan.shards[ranks.rank :: ranks.size]
    if progress:
        progress(
            sum(
                _source_bytes(plan, unit)
                for shard in plan.shards
                if shard not in own
                for unit in shard.units
            )
        )


def write_shards(
    plan: Plan,
    folder: Path,
    *,
    threads: int,
    progress: Progress | None = None,
    statistics: Statistics | None = None,
    ranks: Ranks | None = None,
) -> None:
    """Write the shards of this process and nothing else; see `write`."""
    given = statistics or Statistics(folder=folder, entries={})
    ranks = ranks or Ranks(rank=0, size=1, device=torch.device("cpu"))
    own = plan.shards[ranks.rank :: ranks.size]
    devices, stop = _devices() if ranks.size == 1 else [ranks.device], threading.Event()
    with _one_torch_thread_each(), ThreadPoolExecutor(max(1, threads // ranks.local_size)) as pool:
        jobs = [
            pool.submit(
                _write_shard,
                plan,
                shard,
                folder,
                devices[number % len(devices)],
                progress or _ignore,
                stop,
                given,
            )
            for number, shard in enumerate(own)
        ]
        try:
            for job in as_completed(jobs):
                job.result()
        finally:  # a refusal in one shard, or Ctrl-C, ends the others at their next tensor
            stop.set()
            pool.shutdown(cancel_futures=True)


def _ignore(_: int) -> None:
    """For callers that do not watch."""


# --- one shard
# --------------------------------------------------------------------------------------------------


def _write_shard(
    plan: Plan,
    shard: Shard,
    folder: Path,
    device: torch.device,
    progress: Progress,
    stop: threading.Event,
    given: Statistics,
) -> None:
    """Write one shard under a temporary name, unit by unit, and rename it when it is whole."""
    layout = lay_out((output.name, output.dtype, output.shape) for output in shard.outputs)
    if _is_finished(plan, shard, folder, layout, stop):
        progress(sum(_source_bytes(plan, unit) for unit in shard.units))
        return
    final = folder / shard.file
    sums = {output.name: hashlib.sha256() for output in shard.outputs}
    with naming_file(partial_path(final)), open(partial_path(final), "wb", buffering=0) as file:
        file.write(layout.header)
        file.truncate(layout.num_bytes)
        place = _Place(file=file, starts=layout.starts, sums=sums)
        for unit in shard.units:
            if stop.is_set():
                return
            with _fitting(plan, unit, device):
                _Job(plan=plan, unit=unit, place=place, device=device, given=given).run(progress)
    written = written_sum(layout.header, {name: digest.digest() for name, digest in sums.items()})
    remember(finished_path(folder, shard), plan, shard, written=written)
    complete(final)


@contextmanager
def _fitting(plan: Plan, unit: tuple[TensorPlan, ...], device: torch.device) -> Iterator[None]:
    """Turns running out of a GPU's memory into a refusal; finished shards are kept."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise RecipeError(
            plan.recipe.name,
            f"{unit[0].name} must fit {device} while it is packed",
            got="out of memory",
            cure="Free the device of other processes, or pack fewer weights at a time with "
            "--threads 1",
        ) from error


def _is_finished(
    plan: Plan, shard: Shard, folder: Path, layout: FileLayout, stop: threading.Event
) -> bool:
    """Whether an earlier run has written this shard; one that is not as it was written is
    removed.
    """
    final = folder / shard.file
    if not final.is_file():
        return False
    fault = fault_of(plan, shard, folder, layout, is_stopped=stop.is_set)
    if fault and not stop.is_set():
        _log.warning("%s: %s. It is written again.", final, fault)
        final.unlink()
    return not fault


def _source_bytes(plan: Plan, unit: tuple[TensorPlan, ...]) -> int:
    return sum(plan.entries[name].num_bytes for tensor in unit for name in tensor.inputs)


# --- one unit
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where the tensors of a shard go, and the hashes of what went there. A tensor's pieces follow
    each other.
    """

    file: FileIO
    starts: Mapping[HFName, int]
    sums: Mapping[HFName, "hashlib._Hash"]

    def write(self, name: HFName, raw: torch.Tensor, *, at: int = 0) -> None:
        view = raw.numpy().data
        self.sums[name].update(view)
        write_at(self.file.fileno(), view, self.starts[name] + at)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """One unit of the plan: the only place where weights are read and computed."""

    plan: Plan
    unit: tuple[TensorPlan, ...]
    place: "_Place"
    device: torch.device
    given: Statistics

    def run(self, progress: Progress) -> None:
        if self.unit[0].fate == "quantize":
            self._quantize(progress)
        elif all(output.name in self.given for tensor in self.unit for output in tensor.outputs):
            self._copy_given(progress)
        else:
            for tensor in self.unit:
                self._carry(tensor, progress)

    def _copy_given(self, progress: Progress) -> None:
        """What an algorithm rescaled is complete in the statistics."""
        for tensor in self.unit:
            for output in tensor.outputs:
                self._put((output,), {output.name.rpartition(".")[2]: self.given.read(output.name)})
        progress(_source_bytes(self.plan, self.unit))

    def _quantize(self, progress: Progress) -> None:
        """Experts in 3-D tensors an expert at a time: such a tensor alone may be several GiB."""
        num_groups = self.unit[0].shape[0] if any(tensor.stacked for tensor in self.unit) else 1
        for group in packed_groups(self.plan, self.unit, self.given, device=self.device):
            for module in group:
                self._put(module.outputs, module.tensors)
            progress(_source_bytes(self.plan, self.unit) // num_groups)

    def _carry(self, tensor: TensorPlan, progress: Progress) -> None:
        entries = [self.plan.entries[name] for name in tensor.inputs]
        if tensor.slices:
            weight = load(self.plan, tensor, self.device)
            for output, part in zip(tensor.outputs, separate(weight, tensor.slices), strict=True):
                self._put((output,), {"weight": part})
        elif tensor.fate == "dequantize":
            self._put(tensor.outputs, {"weight": load(self.plan, tensor, self.device)})
        elif tensor.scheme:
            self._put_renamed(tensor)
        else:
            for entry, output in zip(entries, tensor.outputs, strict=True):
                self._copy(entry, output)
        progress(sum(entry.num_bytes for entry in entries))

    def _copy(self, entry: Entry, output: Output) -> None:
        for offset in range(0, entry.num_bytes, _COPY_BYTES):
            length = min(_COPY_BYTES, entry.num_bytes - offset)
            raw = read_bytes(self.plan.source, entry, offset=offset, length=length)
            self.place.write(self.plan.on_disk(output).name, raw, at=offset)

    def _put_renamed(self, tensor: TensorPlan) -> None:
        """Packed weights keep their bytes; scales get compressed-tensors' names and, exactly, its
        dtypes.
        """
        found = parts(self.plan, tensor)
        for output in tensor.outputs:
            suffix = output.name.rpartition(".")[2]
            if suffix in ("weight", "weight_packed"):
                self._copy(weight_of(found), output)
                continue
            entry = found[suffix] if suffix in found else scale_of(found)
            value = read_tensor(self.plan.source, entry)
            if output.dtype == "U8":
                value = value.view(torch.uint8)
            elif output.dtype == "F32" and value.dtype == torch.uint8:  # E8M0 without its name
                value = value.view(torch.float8_e8m0fnu)
            self._put(
                (output,), {suffix: value.to(TORCH_DTYPES[output.dtype]).reshape(output.shape)}
            )

    def _put(self, outputs: tuple[Output, ...], tensors: Mapping[str, torch.Tensor]) -> None:
        """Write one module's tensors."""
        for output in outputs:
            value = tensors[output.name.rpartition(".")[2]].cpu().contiguous()
            got = (tuple(value.shape), value.dtype)
            assert got == (output.shape, TORCH_DTYPES[output.dtype]), (
                f"{output.name}: planned {output}, computed {got}"
            )
            if other := self.plan.spelled.get(output.name):
                value = changed(value, other.change, TORCH_DTYPES[other.output.dtype])
            self.place.write(self.plan.on_disk(output).name, value.reshape(-1).view(torch.uint8))


def _devices() -> list[torch.device]:
    """Every GPU in turn, or the CPU."""
    if torch.cuda.is_available():
        return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return [torch.device("cpu")]


@contextmanager
def _one_torch_thread_each() -> Iterator[None]:
    """Several shards at the same time use the cores better than threads inside one operator."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
