"""How much room an output needs on its disk: weights, other files, hashes, and what calibration
keeps until the end.

In: a plan and a folder. Out: a number of bytes, or a refusal.

Easy to get wrong: what a killed run left is counted once.
"""

from contextlib import suppress
from pathlib import Path

from ...checkpoints.files import can_link, partial_path, refuse_small_disk
from ...checkpoints.safetensors_file import total_bytes
from ..plan.plan import Plan
from .memory import channels

# A line of the index and, in the files of hashes, one for each tensor that is read: name, 64 digits
# and quotes.
_BYTES_A_NAME = 200
_FIXED_BYTES = 1_000_000  # recipe, record, headers of shards


def calibration_folder(out: Path) -> Path:
    """Return the folder that keeps statistics and hidden states until the output is whole."""
    return out.with_name(f"{out.name}.calibration")


def refuse_full_disk(plan: Plan, out: Path, *, with_calibration: bool) -> None:
    """Refuse a disk on which the output cannot be written.

    Args:
        plan: what will be written.
        out: where; its nearest folder that exists is asked.
        with_calibration: whether calibration is still to come.

    Raises:
        RecipeError: says how much is needed and how much is free.
    """
    # What a killed run left is on the disk already, and is written over or kept.
    needed = output_bytes(plan) - _bytes_in(partial_path(out))
    if plan.source.folder is not None and can_link(plan.source.folder, out):
        needed -= total_bytes(plan.linked)
    if with_calibration:
        states = calibration_bytes(plan) - _bytes_in(calibration_folder(out))
        needed += max(0, states)
    refuse_small_disk(out, needed, cure="Choose another OUT, or make room")


def output_bytes(plan: Plan) -> int:
    """Of the finished folder, and of the hashes that an unfinished one has; a little more than
    it will be.
    """
    num_names = plan.num_outputs
    for tensor in plan.tensors:
        num_names += len(tensor.inputs)
    shards = plan.num_bytes_after
    if plan.changed_only:
        shards = total_bytes(plan.written)
    return shards + plan.num_bytes_beside + num_names * _BYTES_A_NAME + _FIXED_BYTES


def calibration_bytes(plan: Plan) -> int:
    """Of statistics, and of the hidden states before and after a layer, and of the last layer whose
    states outlive a power cut; 0 for a plan without batches.

    There are three streams of BF16 states: the calibration text, and the held-out text twice. Where
    batches decide something about the MTP block, there is the calibration text as a server computes
    it, too.
    """
    calibration = plan.recipe.calibration
    if calibration is None or not plan.needs_batches:
        return 0
    sequences = 2 * calibration.held_out + calibration.samples
    if plan.may_calibrate_mtp:
        sequences += calibration.samples
    if plan.recipe.is_searched:
        # It keeps what every layer returns for a part of the text.
        sequences += calibration.samples // 4 * plan.view.num_layers
    # States of three layers, in BF16.
    total = 3 * 2 * sequences * calibration.sequence_length * channels(plan)
    for tensor in plan.tensors:
        if tensor.calibrated == "weights" or tensor.may_change or tensor.tuned:
            total += total_bytes(tensor.outputs)
    return total


def _bytes_in(folder: Path) -> int:
    """Bytes on the disk; a shard that is being written has its full length before it has its
    bytes.
    """
    total = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):  # another run has given the file its final name
            total += path.lstat().st_blocks * 512
    return total
