"""A calibrated run on the CPU and again on the pretended GPU, in a process of its own.

In: a source, a recipe and tokens. Out: an `Outcome` of both runs: what differs, and what the GPU
saw.

Easy to get wrong: the run on the CPU comes first, because a process that has pretended to have a
GPU always has one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from f32_products import multiply_in_f32
from keepmtp.checkpoints.source import open_source
from keepmtp.pipeline import plan_before_measuring
from keepmtp.quantize.calibrate import run as calibration
from keepmtp.quantize.calibrate.data.data import CalibrationData
from keepmtp.quantize.run.ranks import Ranks
from keepmtp.quantize.write import writer
from keepmtp.quantize.write.output import claim
from keepmtp.recipes.schema import Calibration, Recipe
from killed import forks
from pretended_gpu import pretended_gpu
from releases import source_layout, write_checkpoint

CPU = torch.device("cpu")
IDS = torch.randint(3, 300, (4, 16), generator=torch.Generator().manual_seed(0))
DATA = CalibrationData(ids=IDS[:2], held_out_ids=IDS[2:], provenance={"drawn": "by the test"})
BLOCK = Calibration(
    algorithm="minmax",
    dataset="none.jsonl",
    dataset_revision="local",
    split="train",
    column="text",
    samples=2,
    held_out=2,
    sequence_length=16,
    batch_size=2,
    seed=0,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Two runs compared.

    Attributes:
        parts: parts of the model with calibrated tensors.
        files: statistics, states and shards that are not the same bytes, by path.
        figures: of the record, on the CPU and on the GPU, where they differ.
        mixes: what the pretended GPU refused.
        num_waits: see `GPU`.
        peak_bytes: see `GPU`.
    """

    parts: frozenset[str]
    files: tuple[str, ...]
    figures: dict[str, tuple[Any, Any]]
    mixes: tuple[str, ...]
    num_waits: int
    peak_bytes: int


def in_a_child(call: Callable[..., Any], *args: Any) -> Any:
    """What a function of a module returns in a process of its own; what it raises fails the test
    that asks.
    """
    receiver, sender = forks().Pipe(duplex=False)
    child = forks().Process(target=_told, args=(sender, call, *args))
    child.start()
    sender.close()
    try:
        found = receiver.recv()
    except EOFError:
        found = RuntimeError("the child ended without an answer")
    child.join()
    if isinstance(found, BaseException):
        raise found
    return found


def _told(sender: Connection, call: Callable[..., Any], *args: Any) -> None:
    torch.set_num_threads(1)
    multiply_in_f32()
    try:
        sender.send(call(*args))
    except (RuntimeError, ValueError, AssertionError) as error:
        sender.send(RuntimeError(f"{type(error).__name__}: {error}"))
        raise


def family_run(recipe: Recipe, folder: Path) -> Outcome:
    """A tiny checkpoint of a family, its experts (or MLPs) and those of its MTP block calibrated
    for NVFP4.
    """
    source = write_checkpoint(folder / "source", *source_layout(recipe.model), data="random")
    return both(nvfp4_recipe(recipe, source), source, DATA, folder)


def nvfp4_recipe(recipe: Recipe, source: Path) -> Recipe:
    """NVFP4 for the experts (or MLPs) of backbone and MTP block, the rest of the block BF16."""
    plan = plan_before_measuring(recipe, open_source(source))
    own = {tensor.role for tensor in plan.tensors if tensor.part == "mtp"} & {*recipe.backbone}
    words = recipe.backbone | {_large(recipe.backbone): "NVFP4"}
    block = {group: "NVFP4" if group == _large(own) else "bf16" for group in own}
    return recipe.model_copy(
        update={
            "calibration": BLOCK,
            "backbone": words,
            "mtp": block if plan.view.family.draft else "bf16",
        }
    )


def _large(groups: Any) -> str:
    return "experts" if "experts" in groups else "dense_mlp"


def both(recipe: Recipe, source: Path, data: CalibrationData, folder: Path) -> Outcome:
    """Both runs, to `folder / "cpu"` and `folder / "gpu"`."""
    parts, own = line(recipe, source, data, folder / "cpu", CPU)
    with pretended_gpu() as gpu:
        _, theirs = line(recipe, source, data, folder / "gpu", gpu.device)
    return Outcome(
        parts=parts,
        files=different(folder),
        figures={key: (value, theirs[key]) for key, value in own.items() if theirs[key] != value},
        mixes=tuple(gpu.mixes),
        num_waits=gpu.num_waits,
        peak_bytes=gpu.peak_bytes,
    )


def different(folder: Path) -> tuple[str, ...]:
    """Paths of tensors that both runs have not left as the same bytes."""
    cpu, gpu = (
        {
            str(path.relative_to(folder / side)): path.read_bytes()
            for path in (folder / side).rglob("*.safetensors")
        }
        for side in ("cpu", "gpu")
    )
    return tuple(sorted(name for name in cpu | gpu if cpu.get(name) != gpu.get(name)))


def line(
    recipe: Recipe, source: Path, data: CalibrationData, folder: Path, device: torch.device
) -> tuple[frozenset[str], dict[str, Any]]:
    """Calibrate and write on one device: the calibrated parts, and the figures of the record."""
    plan = plan_before_measuring(recipe, open_source(source))
    ranks = Ranks(rank=0, size=1, device=device)
    with patch.object(calibration, "calibration_data", lambda *_: data):
        run = calibration.calibrate(plan, folder / "calibration", ranks=ranks)
    given = {"statistics": run.statistics, "calibration": run.summary, "ranks": ranks}
    on_device = patch.object(writer, "_devices", lambda: [device])
    with claim(run.plan, folder / "out", calibration=run.salt) as partial, on_device:
        writer.write(run.plan, partial, recipe_text="", threads=1, **given)
    return frozenset(tensor.part for tensor in run.plan.tensors if tensor.calibrated), dict(
        run.summary
    )
