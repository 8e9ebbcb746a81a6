"""Backbone passes in processes of their own, which may be killed; for tests of resuming and of
several ranks.

Processes come from a fork server that has imported llm-compressor once, and has computed nothing.
"""

import os
import shutil
import signal
from collections.abc import Mapping
from functools import partial
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import yaml
from commands import free_port
from data_files import json_of, put_json
from keepmtp.recipes.find import find_recipe
from outputs import preloaded

SMALL = {"samples": 8, "held_out": 4, "sequence_length": 32, "batch_size": 2}


def small_recipe(folder: Path, name: str, **changes: Any) -> Path:
    """A shipped recipe over fewer and shorter sequences; `changes` are of its calibration block.
    GPTQ walks over the columns of each matrix, AWQ over a grid: a few matrices show what all of
    them do.
    """
    recipe = yaml.safe_load(find_recipe(name)[1])
    recipe["calibration"] |= SMALL | changes
    if recipe["calibration"]["algorithm"] in ("gptq", "awq") and "experts" in recipe["backbone"]:
        recipe["backbone"] |= {"experts": "bf16", "shared_experts": "bf16"}
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(recipe, sort_keys=False))
    return path


def forks() -> ForkServerContext:
    return preloaded("killed", "keepmtp.pipeline", "keepmtp.quantize.calibrate.layers.backbone")


def start(recipe: Path, folder: Path, **options: Any) -> list[ForkServerProcess]:
    """Start `backbone_pass`, as several ranks if `size` says so."""
    size = options.pop("size", 1)
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "CUDA_VISIBLE_DEVICES": ""}
    common |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), size)
    started = []
    for rank in range(size):
        given = recipe, folder, common | {"RANK": rank, "LOCAL_RANK": rank}
        process = forks().Process(target=backbone_pass, args=given, kwargs=options)
        process.start()
        started.append(process)
    return started


def finished(processes: list[ForkServerProcess], timeout: float = 300) -> list[int | None]:
    """Exit statuses; a process that hangs is killed, and has none."""
    codes = []
    for process in processes:
        process.join(timeout)
        codes.append(process.exitcode)
        if process.exitcode is None:
            process.kill()
            process.join()
    return codes


def statistics(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((folder / "statistics").iterdir())}


def backbone_pass(
    recipe: Path,
    folder: Path,
    environment: Mapping[str, object],
    *,
    kill: tuple[str, int] | None = None,
    killed_rank: int = 0,
    is_whole: bool = False,
) -> None:
    """In a process of its own: the pass; progress goes to <folder>.events-<rank>, a refusal to
    <folder>.error-<rank>.

    Args:
        kill: at which of KILLS, and in which layer, the process ends itself by SIGKILL.
        killed_rank: which of the ranks does so.
        is_whole: run the MTP pass, too; its account of both goes to <folder>.summary-<rank>.
    """
    os.environ.update({key: str(value) for key, value in environment.items()})
    import torch
    from f32_products import multiply_in_f32
    from keepmtp.pipeline import plan_for
    from keepmtp.quantize.calibrate import run
    from keepmtp.quantize.calibrate.data.data import calibration_data
    from keepmtp.quantize.calibrate.layers import backbone as calibrate
    from keepmtp.quantize.run.ranks import joined
    from keepmtp.recipes.errors import KeepMTPError

    torch.set_num_threads(1)
    multiply_in_f32()
    rank = int(str(environment["RANK"]))
    if kill and rank == killed_rank:
        KILLS[kill[0]](calibrate, kill[1])
    with open(beside(folder, "events", rank), "a") as told:
        try:
            with joined() as ranks:
                plan, _ = plan_for(str(recipe))

                def tell(step: Any) -> None:
                    print(step.done, file=told, flush=True)

                if is_whole:
                    found = run.calibrate(plan, folder, ranks=ranks, progress=tell)
                    put_json(beside(folder, "summary", rank), found.summary)
                    return
                data = calibration_data(plan.recipe.calibration, plan.source)
                calibrate.calibrate_backbone(
                    plan, data, folder, device=ranks.device, ranks=ranks, progress=tell
                )
        except KeepMTPError as refusal:
            beside(folder, "error", rank).write_text(str(refusal))
            os._exit(2)


def beside(folder: Path, what: str, rank: int) -> Path:
    return folder.with_name(f"{folder.name}.{what}-{rank}")


def events(folder: Path) -> list[int]:
    """Layers done, in the order in which they were reported."""
    return [*map(int, beside(folder, "events", 0).read_text().splitlines())]


def summary(folder: Path, rank: int = 0) -> dict[str, Any]:
    """What a whole run says of itself, but for how it dealt out the sequences."""
    found = json_of(beside(folder, "summary", rank))
    del found["processes"], found["batch_size"]
    return found


def error(folder: Path, rank: int = 0) -> str:
    path = beside(folder, "error", rank)
    return path.read_text() if path.is_file() else ""


# --- where a process ends itself; each patches the module `calibrate` of its own process ----------


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _at_statistics(calibrate: Any, layer: int, *, is_written: bool) -> None:
    real = calibrate.write_statistics

    def write(path: Path, *args: Any) -> None:
        is_last = path.stem.endswith(f"{layer:05d}")
        if is_written or not is_last:
            real(path, *args)
        if is_last:
            die()

    calibrate.write_statistics = write


def _amid_states(_calibrate: Any, layer: int) -> None:
    """With one batch of `calibration` on disk, and half of the next."""
    from keepmtp.quantize.calibrate.model import states

    real = states._write

    def write(path: Path, *args: Any, **choices: Any) -> None:
        real(path, *args, **choices)
        if path.parent.name == f"{layer + 1:05d}.partial" and path.name > "calibration-000001":
            os.truncate(path, path.stat().st_size // 2)
            die()

    states._write = write


def _amid_removal(_calibrate: Any, layer: int) -> None:
    """The layer's own states are whole; those of the layer before are partly gone."""
    real = shutil.rmtree

    def remove(path: Path, *args: Any, **options: Any) -> None:
        folder = path.parent
        is_whole = (folder / f"{layer + 1:05d}").exists()
        if is_whole and path.exists() and not (folder / f"{layer:05d}").exists():
            next(iter(path.iterdir())).unlink()
            die()
        real(path, *args, **options)

    shutil.rmtree = remove


KILLS = {
    "before statistics": partial(_at_statistics, is_written=False),
    "after statistics": partial(_at_statistics, is_written=True),
    "amid states": _amid_states,
    "amid removal": _amid_removal,
}
