"""The results of calibration: a folder of safetensors files, one a layer, in the names of the
finished checkpoint.

In: tensors that depend on data. Static input scales; every tensor of a module whose weight an
algorithm rewrote, packed already; plain tensors that were rescaled. Out: a `Statistics` from which
the writer copies them. A plan says which of its outputs come from here, and both sides are
compared before anything is written.

Easy to get wrong: with a scale that is missing, or one too many, the checkpoint still loads, but
drafts and answers are noise.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ...checkpoints.files import fresh, making, unwritable
from ...checkpoints.safetensors_file import Entry, FileHeader, fill, read_header
from ...checkpoints.values import typed
from ...recipes.errors import CheckpointError, RecipeError
from ...recipes.family import HFName
from ...recipes.frozen import Raw, frozen, without
from ..plan.plan import Plan
from ..plan.tensor_plan import Output, TensorPlan

# In a file's metadata. safetensors 0.8 writes several keys in another order each time, and the same
# run has to leave the same bytes.
_WORDS = "keepmtp"
_SUMS = "sha256"  # among them: of every tensor


@frozen
class Statistics:
    """The headers of a folder of statistics; no tensor is held in memory."""

    # The folder of the files.
    folder: Path
    # Every tensor, by its name in the finished checkpoint.
    entries: Mapping[HFName, Entry]
    # SHA-256 of their bytes, as calibration wrote them.
    sums: Mapping[HFName, str] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path, *, fingerprint: str | None = None) -> "Statistics":
        """Read the headers of all files in `folder`.

        Args:
            folder: holds files that `write_statistics` wrote, and no other safetensors.
            fingerprint: what `fingerprint` in every file's metadata has to be; None for anything.

        Raises:
            CheckpointError: a file is damaged, or belongs to another run.
        """
        entries = {}
        sums = {}
        for path in sorted(folder.glob("*.safetensors")):
            header = _read(path)
            words = _words_of(header)
            if fingerprint is not None and words.get("fingerprint") != fingerprint:
                rule = "must come from this recipe, source and dataset"
                raise _refusal(path, rule, "statistics of another run")
            entries |= header.entries
            sums |= words.get(_SUMS, {})
        return cls(folder=folder, entries=entries, sums=sums)

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    def __iter__(self) -> Iterator[HFName]:
        return iter(self.entries)

    def path_of(self, name: HFName) -> Path:
        """The file of a tensor."""
        return self.folder / self.entries[name].file

    def read(self, name: HFName) -> Tensor:
        """One tensor, on the CPU.

        Raises:
            CheckpointError: the file has become shorter since it was opened, or has other bytes
                than were written.
        """
        path = self.path_of(name)
        entry = self.entries[name]
        raw = torch.empty(entry.num_bytes, dtype=torch.uint8)
        with open(path, "rb", buffering=0) as file:
            fill(raw.numpy().data, file, entry, where=path, cure=cure_of(path))
        digest = _sum(raw)
        if self.sums.get(name, digest) != digest:
            raise _refusal(path, f"{name} must have the bytes that calibration wrote", "others")
        return typed(raw, entry.dtype, entry.shape)


def write_statistics(
    path: Path, tensors: Mapping[HFName, Tensor], metadata: Mapping[str, str]
) -> None:
    """Write one file, whole or not at all; it survives a power cut once this returns.

    Args:
        path: `<anything>.safetensors`; its folder is made if need be.
        tensors: any device; by name in the finished checkpoint.
        metadata: `fingerprint` says what the values depend on; further keys are the caller's.

    Raises:
        CheckpointError: the disk is full, or cannot be written to.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    apart = {}
    sums = {}
    for name, tensor in tensors.items():
        value = tensor.detach().cpu().contiguous().clone()  # safetensors refuses shared memory
        apart[name] = value
        sums[name] = _sum(value.view(-1).view(torch.uint8))
    with making(path) as partial:
        words = json.dumps({**metadata, _SUMS: sums}, sort_keys=True)
        save(apart, partial, {_WORDS: words})


def read_metadata(path: Path) -> Mapping[str, str]:
    """The metadata of one file, once its header and size have been checked.

    Raises:
        CheckpointError: the file is damaged.
    """
    return without(_words_of(_read(path)), _SUMS)


def _words_of(header: FileHeader) -> Raw:
    return json.loads(header.metadata.get(_WORDS, "{}"))


def save(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str]) -> None:
    """Write a safetensors file.

    Raises:
        CheckpointError: the library cannot, such as on a full disk.
    """
    try:
        save_file(dict(tensors), fresh(path), metadata=dict(metadata))
    except SafetensorError as error:
        raise unwritable(path, error) from error


def refuse_statistics(plan: Plan, statistics: Statistics | None) -> None:
    """Compare what a plan takes from calibration with what is there, both ways. Values are judged
    in the output, before it gets its name.

    Raises:
        RecipeError: the plan needs statistics, and there are none.
        CheckpointError: a tensor is missing, unknown, or not of the planned dtype and shape.
    """
    if statistics is None:
        if plan.needs_calibration:
            raise RecipeError(
                plan.recipe.name,
                f"{', '.join(plan.needs_calibration)} must be calibrated before it is written",
                got="no statistics",
                cure="Run `keepmtp quantize`, which calibrates first, or use a data-free scheme",
            )
        return
    allowed = {}
    for unit in plan.units:
        allowed |= _taken(unit, statistics)
    for name, entry in statistics.entries.items():
        path = statistics.path_of(name)
        wanted = allowed.get(name)
        if wanted is None:
            rule = "every tensor must be one that the plan takes from calibration"
            raise _refusal(path, rule, name)
        if (entry.dtype, entry.shape) != (wanted.dtype, wanted.shape):
            rule = f"{name} must be {wanted.dtype}{list(wanted.shape)}"
            raise _refusal(path, rule, f"{entry.dtype}{list(entry.shape)}")


def _taken(unit: Sequence[TensorPlan], statistics: Statistics) -> dict[HFName, Output]:
    """What one unit takes from the statistics, once all of it is found there."""
    required = []
    optional = []
    for tensor in unit:
        if tensor.calibrated or tensor.tuned:
            required += tensor.calibrated_outputs
        if tensor.may_change:
            optional += tensor.outputs
    names = {output.name for output in required}
    if any(output.name in statistics and output.name not in names for output in optional):
        required += optional  # modules that share a global scale change together
    found = {output.name: output for output in required}
    for name in sorted(found):
        if name not in statistics:
            kind = "mtp-" if unit[0].part == "mtp" else "layer-"
            rule = f"calibration must give {name}"
            cure = cure_of(statistics.folder / kind)
            raise CheckpointError(statistics.folder, rule, got="no such tensor", cure=cure)
    return found


def _read(path: Path) -> FileHeader:
    try:
        return read_header(path, str(path))
    except CheckpointError as error:
        # The same finding as for a source, with another cure: this file can be made again.
        raise error.with_cure(cure_of(path)) from error


def _refusal(path: Path, rule: str, got: str) -> CheckpointError:
    return CheckpointError(path, rule, got=got, cure=cure_of(path))


def cure_of(path: Path) -> str:
    """What to do about a file of statistics. A layer's inputs are gone once the next one is
    done, so all start anew.
    """
    folder = path.parent.parent
    what = "calibration starts anew"
    if path.parent.name == "mtp":
        folder = path.parent
        what = "the MTP block is trained anew"
    elif path.name.startswith("mtp-"):
        folder = folder / "mtp"
        what = "the MTP block is calibrated anew"
    return f"Remove {folder}, and run the same command again: {what}"


def _sum(raw: Tensor) -> str:
    """SHA-256 of a tensor's bytes, as U8 in one dimension on the CPU."""
    return hashlib.sha256(raw.numpy().data).hexdigest()
