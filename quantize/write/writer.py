"""Writes the shards that a plan describes, from its source.

In: a plan over a local source, and the statistics of calibration if it needs them. Out: the shards,
and the other files of `output.py`, in a folder that gets its final name only when it is whole. What
calibration gave is copied; everything else is packed from the source.

Memory holds only the tensors that are being written, whatever the size of shards. After a kill, the
next run keeps the shards that are complete and writes the others again, with the same bytes.

Easy to get wrong: that a file has a shard's name says nothing about its bytes. It gets it once they
are on the disk, and a stamp says what it was made from.
"""

import hashlib
import logging
import threading
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from io import FileIO
from itertools import chain
from pathlib import Path

import torch

from ...checkpoints.dequantize import upright
from ...checkpoints.files import (
    WORK,
    complete,
    fresh,
    naming_file,
    partial_path,
    write_at,
    write_whole,
)
from ...checkpoints.safetensors_file import Entry, lay_out, total_bytes
from ...checkpoints.stored import WEIGHT_LEAVES
from ...checkpoints.values import TORCH_DTYPES, changed, read_bytes, read_parts, read_tensor
from ...recipes.errors import RecipeError
from ...recipes.family import HFName
from ...recipes.forms import TRANSPOSED
from ...recipes.frozen import Advance, Raw, frozen, nowhere
from ..pack.unit import carried, load, packed_groups, parts, separate
from ..plan.plan import Output, Plan, Shard, TensorPlan
from ..plan.tensor_plan import outputs_of, same_output
from ..run.ranks import Ranks
from ..run.statistics import Statistics, refuse_statistics
from .output import finish

_log = logging.getLogger(__name__)
_COPY_BYTES = 8 * 2**20
_WEIGHTS = tuple(f".{leaf}" for leaf in WEIGHT_LEAVES)
_FREE_IT = "Free the device of other processes, or pack fewer weights at a time with --threads 1"
_ALONE = Ranks(rank=0, size=1, device=torch.device("cpu"))


def write(
    plan: Plan,
    partial: Path,
    *,
    recipe_text: str,
    threads: int,
    progress: Advance = nowhere,
    statistics: Statistics | None = None,
    calibration: Raw | None = None,
    ranks: Ranks = _ALONE,
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
    write_shards(
        plan, partial, threads=threads, progress=progress, statistics=statistics, ranks=ranks
    )
    ranks.wait()
    if ranks.is_first:
        finish(plan, partial, recipe_text=recipe_text, calibration=calibration)
    ranks.wait()
    own = plan.written[ranks.rank :: ranks.size]
    for shard in plan.shards:
        if shard not in own:
            progress(plan.num_bytes_read(chain(*shard.units)))


def write_shards(
    plan: Plan,
    folder: Path,
    *,
    threads: int,
    progress: Advance = nowhere,
    statistics: Statistics | None = None,
    ranks: Ranks = _ALONE,
) -> None:
    """Write the shards of this process and nothing else; see `write`."""
    devices = [ranks.device]
    if ranks.size == 1:
        devices = _devices()
    stop = threading.Event()
    torch_threads = torch.get_num_threads()
    if statistics is None:
        statistics = Statistics(folder=folder, entries={})
    # Several shards at a time use the cores better than threads inside one operator.
    torch.set_num_threads(1)
    with ThreadPoolExecutor(max(1, threads // ranks.local_size)) as pool:
        jobs = []
        for number, shard in enumerate(plan.written[ranks.rank :: ranks.size]):
            job = _Job(
                plan=plan,
                shard=shard,
                device=devices[number % len(devices)],
                given=statistics,
                progress=progress,
                stop=stop,
            )
            jobs.append(pool.submit(job.write, folder))
        try:
            for job in as_completed(jobs):
                job.result()
        finally:  # a refusal in one shard, or Ctrl-C, ends the others at their next tensor
            stop.set()
            pool.shutdown(cancel_futures=True)
            torch.set_num_threads(torch_threads)


def _devices() -> list[torch.device]:
    """Every GPU in turn, or the CPU."""
    devices = list[torch.device]()
    for index in range(torch.cuda.device_count()):
        devices.append(torch.device("cuda", index))
    return devices or [torch.device("cpu")]


@frozen
class _Job:
    """One shard of a plan, and what it is made with."""

    plan: Plan
    shard: Shard
    device: torch.device
    given: Statistics
    progress: Advance
    stop: threading.Event

    def write(self, folder: Path) -> None:
        """Write the shard under a temporary name, unit by unit, and rename it when it is whole."""
        plan = self.plan
        shard = self.shard
        final = folder / self.shard.file
        layout = lay_out(shard.outputs)
        kept = folder / WORK / f"{shard.file}.sha256"
        stamp = self._stamp(layout.header)
        if final.is_file():  # of an earlier run
            is_whole = final.stat().st_size == layout.num_bytes
            if is_whole and kept.is_file() and kept.read_text() == stamp:
                self.progress(plan.num_bytes_read(chain(*shard.units)))
                return
            rule = "it or its source has changed since it was written. It is written again"
            _log.warning("%s: %s.", final, rule)
            final.unlink()
        partial = fresh(partial_path(final))
        with naming_file(partial), open(partial, "xb", buffering=0) as file:
            # The plan fixes every output's name, dtype and shape: the header can be written first,
            # and each tensor directly at its place.
            file.write(layout.header)
            file.truncate(layout.num_bytes)
            for unit in shard.units:
                if self.stop.is_set():
                    return
                try:
                    self.run(unit, _Place(plan, file, layout.starts))
                except torch.OutOfMemoryError as error:  # finished shards are kept
                    raise RecipeError(
                        plan.recipe.name,
                        f"{unit[0].name} must fit {self.device} while it is packed",
                        got="out of memory",
                        cure=_FREE_IT,
                    ) from error
        write_whole(kept, stamp)
        complete(final)

    def _stamp(self, header: bytes) -> str:
        """A hash over the header of a shard and what it is made from."""
        digest = hashlib.sha256(header)
        plan = self.plan
        files = set[str]()
        for unit in self.shard.units:
            for tensor in unit:
                for name in tensor.inputs:
                    files.add(plan.entries[name].file)
        # The source may have become another one, so the stamps of its files count. Hashes of what
        # is read would say more of a source that was moved, but they double the work, and a shard
        # is written again as fast as compared.
        for file in sorted(files & plan.source.states.keys()):
            state = plan.source.states[file]
            if plan.keeps_shards:  # a link changes the ctime
                state = state.model_copy(update={"ctime_ns": 0})
            digest.update(f"{file} {state!r}".encode())
        return digest.hexdigest()

    def run(self, unit: tuple[TensorPlan, ...], place: "_Place") -> None:
        """Read, compute and write one unit of the plan."""
        num_bytes = self.plan.num_bytes_read(unit)
        outputs = outputs_of(unit)
        if unit[0].fate == "quantize":
            # A 3-D tensor of experts, or a head, may be several GiB: it is packed an expert, or
            # some rows, at a time.
            rows = Counter[HFName]()
            size = total_bytes(outputs)
            for group in packed_groups(self.plan, unit, self.given, device=self.device):
                written = 0
                for module in group:
                    for output in module.outputs:
                        first = rows[output.name]
                        if first == output.shape[0]:  # of the whole, and came with the first rows
                            continue
                        value = module.tensors[output.name.rpartition(".")[2]]
                        part = output._replace(shape=(len(value), *output.shape[1:]))
                        at = self.plan.on_disk(output).num_bytes * first // output.shape[0]
                        place.put(part, value, at=at)
                        rows[output.name] += len(value)
                        written += part.num_bytes
                self.progress(num_bytes * written // size)
            assert all(rows[output.name] == output.shape[0] for output in outputs), unit[0].name
            return
        given = [output for output in outputs if output.name in self.given]
        if len(given) == len(outputs):  # an algorithm rescaled it
            for output in given:
                place.put(output, self.given.read(output.name))
        else:
            for tensor in unit:
                self._carry(tensor, place)
        self.progress(num_bytes)

    def _carry(self, tensor: TensorPlan, place: "_Place") -> None:
        """A tensor that is not quantized here. Scales get compressed-tensors' names and, exactly,
        its dtypes.
        """
        if tensor.fate == "dequantize":
            weight = load(self.plan, tensor, self.device)
            pieces = (weight,)
            if tensor.slices:
                pieces = separate(weight, tensor.slices)
            for output, piece in zip(tensor.outputs, pieces, strict=True):
                place.put(output, piece)
            return
        if tensor.form in TRANSPOSED and not self.plan.stays(tensor):
            found = read_parts(self.plan.source, parts(self.plan, tensor))
            values = upright(tensor.form, found, tensor.shape)
            for output in tensor.outputs:
                place.put(output, values[output.name.rpartition(".")[2]])
            return
        for output, entry, change in carried(self.plan, tensor):
            is_same = self.plan.on_disk(output) == same_output(entry)
            if is_same or tensor.fate == "add" or output.name.endswith(_WEIGHTS):
                place.copy(output, entry)
                continue
            value = read_tensor(self.plan.source, entry)
            if output.dtype == "U8":
                value = value.view(torch.uint8)
            elif output.dtype == "F32" and value.dtype == torch.uint8:  # E8M0 without its name
                value = value.view(torch.float8_e8m0fnu)
            value = changed(value, change, TORCH_DTYPES[output.dtype])
            place.put(output, value.reshape(output.shape))


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the tensors of a shard go."""

    plan: Plan
    file: FileIO
    starts: Mapping[HFName, int]

    def put(self, output: Output, value: torch.Tensor, *, at: int = 0) -> None:
        """Write a tensor, or rows of it at this byte, as the recipe's format spells it."""
        got = (tuple(value.shape), value.dtype)
        assert got == (output.shape, TORCH_DTYPES[output.dtype]), f"{output}: computed {got}"
        value = value.cpu().contiguous()
        other = self.plan.spelled.get(output.name)
        if other is not None:
            value = changed(value, other.change, TORCH_DTYPES[other.output.dtype])
        self._write(output, value.reshape(-1).view(torch.uint8), at=at)

    def copy(self, output: Output, entry: Entry) -> None:
        """Copy the bytes of a source tensor."""
        for offset in range(0, entry.num_bytes, _COPY_BYTES):
            length = min(_COPY_BYTES, entry.num_bytes - offset)
            self._write(
                output, read_bytes(self.plan.source, entry, offset=offset, length=length), at=offset
            )

    def _write(self, output: Output, raw: torch.Tensor, *, at: int) -> None:
        name = self.plan.on_disk(output).name
        write_at(self.file.fileno(), raw.numpy().data, self.starts[name] + at)
