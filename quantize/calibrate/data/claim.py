"""Which run a calibration folder belongs to: one recipe, source, dataset and set of versions.

In: a plan, its batches and a folder. Out: a folder that is this run's, or a refusal that names what
differs.

Easy to get wrong: a run that is resumed with something else changed makes a checkpoint of two
halves. So the fingerprint covers everything that a number depends on, and nothing else: each thing
too much costs hours. The largest magnitudes that minmax and smoothquant look for are the same
however the sequences are dealt out. GPTQ and AWQ add up numbers batch by batch and process by
process, and a sum in another order has other last bits; so has what AutoRound learns from; and the
importance of input channels is a sum.

Source: transformers 5.17 integrations/hub_kernels.py (`use_kernel_func_from_hub_with_fallback`: a
package that is installed replaces a model's own functions).
"""

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .... import __version__
from ....checkpoints.files import write_whole
from ....recipes.errors import RecipeError
from ...plan.plan import Plan
from ...run.processes import refuse_processes
from ...run.ranks import Ranks
from .data import CalibrationData
from .tokenize import one_line

_PACKAGES = ("torch", "transformers", "llmcompressor", "compressed-tensors")
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
_KERNELS = ("causal-conv1d", "flash-linear-attention", "mamba-ssm")
_STAMP, _PARTS = "fingerprint", "fingerprint.json"


def fingerprint(plan: Plan, data: CalibrationData, size: int) -> str:
    """SHA-256 over everything the statistics depend on; not the MTP policy, which may change
    without a new pass.
    """
    return _sum(_parts(plan, data, size))


def search_fingerprint(plan: Plan, data: CalibrationData, size: int) -> str:
    """SHA-256 over everything the sensitivities of a search depend on; not its budget, nor what is
    asked of its plans.

    Here batches and processes count always: sensitivities are sums.
    """
    parts = _parts(plan, data, size)
    for key in ("budget", "backbone_auto"):
        parts["recipe"].pop(key, None)
    auto = plan.recipe.backbone_auto
    assert auto is not None
    own = auto.model_dump(mode="json", exclude={"min_acceptance"})
    parts["search"] = {
        **own,
        "mtp": plan.recipe.mtp,
        "processes": size,
        "batch_size": plan.calibration.batch_size,
    }
    return _sum(parts)


def claim_pass(plan: Plan, data: CalibrationData, folder: Path, ranks: Ranks) -> None:
    """Mark the folder as this run's, or refuse one of another run.

    Raises:
        RecipeError: the folder is another run's, or is not the same for all ranks; or a rank has no
            sequence.
    """
    parts, stamp, before = _parts(plan, data, ranks.size), folder / _STAMP, _parts_of(folder)
    wanted, anew = _sum(parts), f"or remove {folder} to start anew"
    has_states = any((folder / "states").glob("*"))
    if stamp.read_text() != wanted if stamp.is_file() else has_states:
        same = "recipe, source, dataset and versions"
        rule = f"an unfinished calibration can only be resumed with the same {same}"
        got, cure = _difference(before, parts), f"Undo this change to go on, {anew}"
        raise RecipeError(folder, rule, got=f"another {got}", cure=cure)
    device = before.get("device", ranks.device.type)
    if device != ranks.device.type:  # on the CPU it would take days, and round elsewhere
        rule = f"a calibration that was begun on {device} must go on there"
        cure = f"Look at `nvidia-smi` and CUDA_VISIBLE_DEVICES, {anew}"
        raise RecipeError(folder, rule, got=f"{ranks.device.type} on {ranks}", cure=cure)
    if stamp.is_file() and plan.may_calibrate_mtp and not has_mtp_stream(folder):
        # It was begun for a block that needs no batches: its layers are gone, and so are these
        # states.
        rule = "the MTP block must be calibrated on what the quantized backbone computes"
        cure = f"Keep to a `--mtp` word that needs no data, {anew}"
        raise RecipeError(folder, rule, got="a calibration without these states", cure=cure)
    refuse_processes(plan.calibration, ranks.size, plan.recipe.name)
    # Before the first writes: a rank that refuses must see what an earlier run wrote, not this one.
    ranks.wait()
    if ranks.is_first and not stamp.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        own = {"device": ranks.device.type, "mtp_stream": plan.may_calibrate_mtp}
        write_whole(folder / _PARTS, json.dumps({**parts, **own}, indent=1))
        write_whole(stamp, wanted)
    ranks.wait()
    if not stamp.is_file() or stamp.read_text() != wanted:
        raise RecipeError(
            folder,
            "all processes must see one folder and the same source",
            got=f"another or none on {ranks}",
            cure="Put the source and OUT where every node sees them, under the same path",
        )


def _parts(plan: Plan, data: CalibrationData, size: int) -> dict[str, dict[str, Any]]:
    """What a number depends on, by the words that a refusal uses; JSON values only."""
    settings = plan.calibration.model_dump(mode="json")
    batch_size = settings.pop("batch_size")
    # Whether results are largest values alone, which no order of batches changes; importance is a
    # sum.
    is_of_any_split = (
        plan.calibration.algorithm in _OF_ANY_SPLIT and plan.recipe.search != "imatrix"
    )
    parts: dict[str, dict[str, Any]] = {
        "recipe": plan.recipe.model_dump(mode="json", exclude=_PASSED_OVER),
        "calibration": settings,
        "source": {
            name: state.model_dump(mode="json") for name, state in plan.source.states.items()
        },
        "config.json": dict(plan.source.config),
        "dataset": dict(data.provenance),
        "versions": {"keepmtp": __version__, **_versions(plan)},
        "split": {} if is_of_any_split else {"batch_size": batch_size, "processes": size},
    }
    return json.loads(json.dumps(parts, default=str))


def _sum(parts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _versions(plan: Plan) -> dict[str, str]:
    """Of the packages that compute; transformers takes kernels for a model's own functions where
    they are installed.
    """
    names = [*_PACKAGES, *_KERNELS]
    if plan.calibration.backend == "modelopt":
        names.append("nvidia-modelopt")
    if plan.calibration.algorithm == "autoround":
        names.append("auto-round")
    found = dict.fromkeys(names, "not installed")
    for name in names:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _parts_of(folder: Path) -> dict[str, Any]:
    """What the pass in a folder depends on; nothing where none was begun."""
    path = folder / _PARTS
    return json.loads(path.read_text()) if path.is_file() else {}


def _difference(before: Mapping[str, Any], parts: Mapping[str, Mapping[str, Any]]) -> str:
    """The first thing that is not as it was: "calibration (seed was 42 and is 43)"."""
    for name, now in parts.items():
        was = before.get(name, now)
        for key in {**was, **now}:
            if was.get(key) != now.get(key):
                old, new = (one_line(json.dumps(each.get(key)), 60) for each in (was, now))
                return f"{name} ({key} was {old} and is {new})"
    return "run"


def has_mtp_stream(folder: Path) -> bool:
    """Whether the pass in a folder hands on the calibration text as a server computes it, for an
    MTP block.
    """
    return bool(_parts_of(folder).get("mtp_stream"))
