"""Which run a calibration folder belongs to: one recipe, source, dataset, number of processes and set of versions.

In: a plan, its batches and a folder. Out: a folder that is this run's, or a refusal.

Easy to get wrong: a run that is resumed with something else changed makes a checkpoint of two halves. The fingerprint
covers everything that the statistics depend on.
"""

import hashlib
import json
from importlib.metadata import version
from pathlib import Path

from ... import __version__
from ...checkpoints.files import write_whole
from ...recipes.errors import RecipeError
from ..plan import Plan
from .data import CalibrationData
from .ranks import Ranks


def fingerprint(plan: Plan, data: CalibrationData, size: int) -> str:
    """SHA-256 over everything the statistics depend on; not the MTP policy, which may change without a new pass."""
    recipe = plan.recipe.model_dump(mode="json", exclude={"mtp", "mtp_auto", "variant", "default", "summary"})
    files = {name: state.model_dump() for name, state in plan.source.states.items()}
    packages = ("torch", "transformers", "llmcompressor", "compressed-tensors")
    versions = [__version__, *(version(name) for name in packages)]
    parts = (recipe, plan.source.config, files, data.provenance, versions, size)
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def claim_pass(plan: Plan, data: CalibrationData, folder: Path, ranks: Ranks) -> None:
    """Mark the folder as this run's, or refuse one of another run.

    Raises:
        RecipeError: see the three rules below.
    """
    wanted, stamp = fingerprint(plan, data, ranks.size), folder / "fingerprint"
    if stamp.is_file() and stamp.read_text() != wanted:
        raise RecipeError(
            folder,
            "an unfinished calibration can only be resumed with the same recipe, source, dataset, "
            "number of processes and versions",
            got="another run",
            cure="Remove it, or choose another OUT",
        )
    calibration = plan.recipe.calibration
    assert calibration is not None
    fewest = min(len(data.ids), len(data.held_out_ids)) // calibration.batch_size
    if fewest < ranks.size:
        raise RecipeError(
            plan.recipe.name,
            "every process must have a batch of calibration and of held-out text",
            got=f"{fewest} batches of {calibration.batch_size} for {ranks.size} processes",
            cure="Raise calibration.samples and calibration.held_out, lower batch_size, or start fewer processes",
        )
    ranks.wait()  # before the first writes: a rank that refuses must see what an earlier run wrote, not this one
    if ranks.is_first and not stamp.is_file():
        (folder / "states").mkdir(parents=True, exist_ok=True)
        write_whole(stamp, wanted)
    ranks.wait()
    if not stamp.is_file() or stamp.read_text() != wanted:
        raise RecipeError(
            folder,
            "all processes must see one folder and the same source",
            got=f"another or none on {ranks}",
            cure="Put the source and OUT where every node sees them, under the same path",
        )
