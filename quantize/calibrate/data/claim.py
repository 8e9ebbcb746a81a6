"""Which run a calibration folder belongs to: one recipe, source, dataset and set of versions.

In: a plan, its batches and a folder. Out: a folder that is this run's, or a refusal that names what
differs.

Easy to get wrong: a run that is resumed with something else changed makes a checkpoint of two
halves. So the fingerprint covers everything that a number depends on, and nothing else: each thing
too much costs hours. The largest magnitudes that minmax and smoothquant look for are the same
however the sequences are dealt out. GPTQ and AWQ add up numbers batch by batch and process by
process, and a sum in another order has other last bits; so has what AutoRound learns from.

Source: transformers 5.17 integrations/hub_kernels.py (`use_kernel_func_from_hub_with_fallback`: a
package that is installed replaces a model's own functions).
"""

import hashlib
import json
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .... import __version__
from ....checkpoints.files import write_whole
from ....checkpoints.identity import FileStamp
from ....recipes.errors import RecipeError
from ....recipes.frozen import Json, Raw
from ...plan.plan import Plan
from ...run.ranks import Ranks
from .data import CalibrationData
from .tokenize import one_line

_PACKAGES = (
    "torch",
    "transformers",
    "llmcompressor",
    "compressed-tensors",
    "nvidia-modelopt",
    "auto-round",
    "causal-conv1d",
    "flash-linear-attention",
    "mamba-ssm",
)
# What the recipe says besides: the MTP policy may change without a new pass, the others change no
# number.
_OF_THE_BLOCK = {"mtp", "mtp_auto", "mtp_tuned"}
_PASSED_OVER = _OF_THE_BLOCK | {
    "variant",
    "default",
    "summary",
    "format",
    "evaluation",
    "gates",
    "calibration",
}
_OF_ANY_SPLIT = frozenset({"minmax", "smoothquant", "mse", "four-over-six"})
_PARTS, _MTP = "fingerprint.json", "MTP block"


def fingerprint(plan: Plan, data: CalibrationData, size: int) -> str:
    """SHA-256 over everything the statistics depend on; not the MTP policy, which may change
    without a new pass.
    """
    parts = _parts(plan, data, size)
    for state in parts["source"].values():
        # Links change the ctime, and a number does not depend on it. `claim_pass` compares it.
        del state["ctime_ns"], state["num_links"]
    return _sum(parts)


def search_fingerprint(plan: Plan, data: CalibrationData, size: int) -> str:
    """SHA-256 over everything the sensitivities of a search depend on; not its budget.

    Here batches and processes count always: sensitivities are sums.
    """
    parts = _parts(plan, data, size)
    for key in ("budget", "backbone_auto"):
        parts["recipe"].pop(key, None)
    auto = plan.recipe.backbone_auto
    assert auto is not None
    parts["search"] = {
        **auto.model_dump(mode="json"),
        "mtp": plan.recipe.mtp,
        "processes": size,
        "batch_size": plan.calibration.batch_size,
    }
    return _sum(parts)


def claim_pass(plan: Plan, data: CalibrationData, folder: Path, ranks: Ranks) -> None:
    """Mark the folder as this run's, or refuse one of another run.

    Raises:
        RecipeError: the folder is another run's, or is not the same for all ranks.
    """
    parts = _parts(plan, data, ranks.size)
    before = _parts_of(folder)
    # On the CPU it would take days, and round elsewhere.
    now = {**parts, "device": {"type": ranks.device.type}}
    recorded = before.get("source", {})
    now["source"] = {
        name: _recorded(recorded.get(name), state) for name, state in plan.source.states.items()
    }
    if plan.may_calibrate_mtp:  # of a pass without them the layers are gone that compute them
        now[_MTP] = {"has_states": True}
    if before or any((folder / "states").glob("*")):
        # The first thing that is not as it was: "calibration (seed was 42 and is 43)".
        for name, values in now.items():
            was = before.get(name, {})
            for key in {**was, **values}:
                if was.get(key) == values.get(key):
                    continue
                old, new = (one_line(json.dumps(each.get(key)), 60) for each in (was, values))
                raise RecipeError(
                    folder,
                    "an unfinished calibration can only be resumed with the same recipe, source, "
                    "dataset, versions and device",
                    got=f"another {name} ({key} was {old} and is {new})",
                    cure=f"Undo this change to go on, or remove {folder} to start anew",
                )
    # Before the first writes: a rank that refuses must see what an earlier run wrote, not this one.
    ranks.wait()
    if ranks.is_first and not before:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / _PARTS, json.dumps(now, indent=1))
    ranks.wait()
    if not now.items() <= _parts_of(folder).items():
        raise RecipeError(
            folder,
            "all processes must see one folder and the same source",
            got=f"another or none on {ranks}",
            cure="Put the source and OUT where every node sees them, under the same path",
        )


def left_behind(path: Path, ranks: Ranks) -> Any:
    """What an earlier run has left in a JSON file; None where there is none."""

    def read() -> Any:
        if not path.is_file():
            return None
        return json.loads(path.read_text())

    # One rank looks for all: each for itself, one could find what another has not seen yet, and
    # wait for its sums.
    return ranks.of_first(read)


def _parts(plan: Plan, data: CalibrationData, size: int) -> dict[str, Json]:
    """What a number depends on, by the words that a refusal uses; JSON values only."""
    settings = plan.calibration.model_dump(mode="json")
    split = {"batch_size": settings.pop("batch_size"), "processes": size}
    # Results that are largest values alone, which no order of batches changes.
    if plan.calibration.algorithm in _OF_ANY_SPLIT:
        split = {}
    versions = {"keepmtp": __version__}
    for name in _PACKAGES:  # transformers takes kernels for a model's own functions, if installed
        versions[name] = "not installed"
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    parts: dict[str, Json] = {
        "recipe": plan.recipe.model_dump(mode="json", exclude=_PASSED_OVER),
        "calibration": settings,
        "source": {
            name: state.model_dump(mode="json") for name, state in plan.source.states.items()
        },
        "config.json": dict(plan.source.config),
        "dataset": dict(data.provenance),
        "versions": versions,
        "split": split,
    }
    return json.loads(json.dumps(parts, default=str))


def _recorded(before: Raw | None, state: FileStamp) -> Raw:
    """The state of a file; the recorded one where nobody wrote to the file since."""
    if before is not None and FileStamp.model_validate(before).is_unwritten(state):
        return before
    return state.model_dump(mode="json")


def _sum(parts: Raw) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _parts_of(folder: Path) -> Json:
    """What the pass in a folder depends on; nothing where none was begun."""
    path = folder / _PARTS
    if not path.is_file():
        return {}
    return json.loads(path.read_text())


def has_mtp_stream(folder: Path) -> bool:
    """Whether the pass in a folder hands on the calibration text as a server computes it, for an
    MTP block.
    """
    return _MTP in _parts_of(folder)
