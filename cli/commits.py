"""What a run reads from the Hub: the commits, in one line, and whether they may be others tomorrow.

In: a plan. Out: a line for people; the record of the checkpoint has the same commits.

Easy to get wrong: this is also where an unreachable dataset is found, before hours of work or an installation.
"""

from ..checkpoints.commits import dataset_commit
from ..quantize.plan.plan import Plan
from ..recipes.model_file import find_path
from ..recipes.pinned import moves
from ..recipes.schema import Texts

_LOCAL = "local"


def commits_line(plan: Plan) -> str:
    """The commits of model and dataset, and how to keep them; "" where nothing is from the Hub.

    Raises:
        RecipeError: the dataset is on the Hub, and this machine cannot read it.
    """
    parts, branches = [], []
    if plan.source.revision != _LOCAL:
        parts.append(f"{plan.source.where} at commit {plan.source.revision}")
        branches += [plan.recipe.revision] if moves(plan.recipe.revision) else []
    if (other := plan.source.mtp_source) is not None and other.revision != _LOCAL:
        parts.append(f"its MTP block from {other.where} at commit {other.revision}")
        known = plan.recipe.mtp_source
        branches += [known.revision] if known is not None and moves(known.revision) else []
    calibration = plan.recipe.calibration
    mix = calibration.mix if calibration is not None and plan.needs_batches else ()
    for texts in filter(_is_on_the_hub, mix):
        name, revision = texts.dataset, texts.dataset_revision
        parts.append(f"dataset {name} at commit {dataset_commit(name, revision, f'calibration.dataset {name}')}")
        branches += [revision] if moves(revision) else []
    if not parts:
        return ""
    kept = f"{', '.join(dict.fromkeys(branches))} may move: `keepmtp pin` writes commits into a recipe"
    return f"reads {', '.join(parts)}" + (f"; {kept}" if branches else "")


def _is_on_the_hub(texts: Texts) -> bool:
    name = texts.dataset
    return texts.dataset_revision != _LOCAL and find_path(name) is None and name.count("/") == 1
