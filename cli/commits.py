"""What a run reads from the Hub: the commits, in one line, and whether they may be others tomorrow.

In: a plan. Out: a line for people; the record of the checkpoint has the same commits.

Easy to get wrong: this is also where an unreachable dataset is found, before hours of work or an
installation.
"""

from ..checkpoints.hub import dataset_commit
from ..quantize.plan.plan import Plan
from ..recipes.model_file import find_path
from ..recipes.pinned import moves

_LOCAL = "local"


def commits_line(plan: Plan) -> str:
    """The commits of model and dataset, and how to keep them; "" where nothing is from the Hub.

    Raises:
        RecipeError: the dataset is on the Hub, and this machine cannot read it.
    """
    recipe, source, other = plan.recipe, plan.source, plan.source.mtp_source
    read = [(source.where, source.revision, recipe.revision)]
    if other is not None:
        asked = recipe.mtp_source.revision if recipe.mtp_source else _LOCAL
        read.append((f"its MTP block from {other.where}", other.revision, asked))
    calibration = recipe.calibration
    for texts in calibration.mix if calibration is not None and plan.needs_batches else ():
        name, asked = texts.dataset, texts.dataset_revision
        if asked != _LOCAL and find_path(name) is None and name.count("/") == 1:
            commit = dataset_commit(name, asked, f"calibration.dataset {name}")
            read.append((f"dataset {name}", commit, asked))
    read = [each for each in read if each[1] != _LOCAL]
    line = ", ".join(f"{what} at commit {commit}" for what, commit, _ in read)
    if branches := dict.fromkeys(asked for *_, asked in read if asked != _LOCAL and moves(asked)):
        line += f"; {', '.join(branches)} may move: `keepmtp pin` writes commits into a recipe"
    return line and f"reads {line}"
