"""Everything a plan needs from batches: data -> search -> backbone pass -> MTP pass -> statistics
for the writer.

In: a plan over a local source whose recipe has a calibration block. Out: a `CalibrationRun`: the
plan with the MTP policy decided, the statistics it takes its tensors from, and the figures that go
into the checkpoint's provenance.

"""

import json
from contextlib import nullcontext
from pathlib import Path

from ...checkpoints.files import held, refuse_strange
from ...recipes.frozen import Json, Raw, frozen
from ..plan.choices import found_text
from ..plan.own_code import refuse_untrusted_code
from ..plan.plan import Plan
from ..run.progress import ProgressCallback
from ..run.ranks import Ranks
from ..run.statistics import Statistics, read_metadata, refuse_statistics
from .data.claim import fingerprint
from .data.data import calibration_data
from .layers.backbone import calibrate_backbone
from .mtp.mtp_pass import mtp_pass, refuse_held_out, refuse_mtp
from .search.search_pass import search


@frozen
class CalibrationRun:
    """The result of both passes.

    Attributes:
        plan: what is to be written.
        statistics: for the writer.
        salt: a hash of recipe, data, source and versions, which a resumed writer compares.
        summary: for keepmtp.json: the data's provenance, coverage, acceptance, candidates.
        recipe_text: the recipe that a search found, as a file; "" where nothing was searched.
    """

    plan: Plan
    statistics: Statistics
    salt: str
    summary: Raw
    recipe_text: str = ""


def calibrate(
    plan: Plan, folder: Path, *, ranks: Ranks, progress: ProgressCallback | None = None
) -> CalibrationRun:
    """Run both passes, resuming what an earlier run left in `folder`.

    Args:
        plan: over a local source.
        folder: of this run alone; on several nodes one that all of them see.
        ranks: which part of the batches is this process's.
        progress: called after each step.

    Raises:
        RecipeError: data, recipe and model do not fit, or `folder` holds another run.
        CheckpointError: the model computes NaN, or parts of it are never called.
        GateError: `mtp: auto` finds nothing good enough.
    """
    # All that can be refused is refused before the backbone pass, which may take hours.
    refuse_untrusted_code(plan)
    no_block = refuse_mtp(plan)
    refuse_strange(folder, below=True)
    # Read once for all: the other ranks need neither the dataset nor its host.
    data = ranks.of_first(lambda: calibration_data(plan.calibration, plan.source))
    if plan.recipe.measures_mtp:
        refuse_held_out(plan, data)
    folder.mkdir(parents=True, exist_ok=True)
    alone = nullcontext()
    if ranks.is_first:
        alone = held(folder, "only one run may calibrate for an output")
    with alone:
        settled = plan
        fact = None
        if plan.recipe.is_searched:
            settled, fact = search(
                plan,
                data,
                folder / "search",
                ranks=ranks,
                can_draft=no_block is None,
                progress=progress,
            )
        backbone = calibrate_backbone(
            settled, data, folder, device=ranks.device, ranks=ranks, progress=progress
        )
        chosen, mtp = mtp_pass(settled, backbone, refusal=no_block, progress=progress)
        ranks.wait()
        salt = fingerprint(settled, data, ranks.size)
        statistics = Statistics.open(folder / "statistics", fingerprint=salt)
        refuse_statistics(chosen, statistics)
    summary: Json = {
        "data": dict(data.provenance),
        "processes": ranks.size,
        "batch_size": plan.calibration.batch_size,
        "coverage": _coverage(folder / "statistics"),
        "min_acceptance": None,
        "confidence": None,
        **mtp.model_dump(mode="json"),
    }
    if mtp.tuned is None:
        del summary["tuned"]
    if plan.recipe.mtp_auto:
        summary["min_acceptance"] = plan.recipe.mtp_auto.min_acceptance
        summary["confidence"] = plan.recipe.gates.confidence
    recipe_text = ""
    if fact is not None:
        summary["search"] = fact.model_dump(mode="json")
        recipe_text = found_text(chosen.recipe)
    return CalibrationRun(
        plan=chosen, statistics=statistics, salt=salt, summary=summary, recipe_text=recipe_text
    )


def _coverage(folder: Path) -> Json:
    """How many tokens the modules on disk saw; of routed experts, how many the router sent them."""
    tokens = {}
    for path in sorted(folder.glob("layer-*.safetensors")):
        tokens |= json.loads(read_metadata(path)["coverage"])
    fewest = None
    if tokens:
        module = min(tokens, key=tokens.__getitem__)
        fewest = {"module": module, "tokens": tokens[module]}
    return {
        "modules": len(tokens),
        "never_routed": [module for module, count in tokens.items() if count == 0],
        "fewest_tokens": fewest,
    }
