"""Which commit a branch or a tag of the Hub is now: of a model, and of a dataset.

In: a Hub id and a revision. Out: the commit, or a refusal in one sentence. Nothing is downloaded.

Easy to get wrong: a dataset is asked for before `datasets` is imported, so that a Hub out of reach
is found in time.
"""

from huggingface_hub import HfApi

from ..recipes.errors import NoCheckpointError, RecipeError
from .hub import files_of, hub_errors

_TIMEOUT_SECONDS = 10


def model_commit(repo: str, revision: str) -> str:
    """The commit of a model.

    Raises:
        NoCheckpointError: as `hub.files_of`.
    """
    return files_of(repo, revision)[0]


def dataset_commit(name: str, revision: str, where: str) -> str:
    """The commit of a dataset.

    Args:
        name: its Hub id.
        revision: a branch, a tag or a commit.
        where: who names it, for the refusal.

    Raises:
        RecipeError: there is none that this machine may read, or the Hub does not answer.
    """
    kind = "a dataset on the Hub, or a file or folder"
    try:
        with hub_errors(name, revision, kind):
            return (
                HfApi().dataset_info(name, revision=revision, timeout=_TIMEOUT_SECONDS).sha
                or revision
            )
    except NoCheckpointError as error:
        cure = (
            "Check its name and dataset_revision, ask for access on its page, run `hf auth "
            "login`; or where the Hub "
        )
        cure += (
            f"is reachable run `hf download --repo-type dataset {name} --local-dir DIR`, and "
            "name the folder"
        )
        raise RecipeError(where, error.rule, got=error.got, cure=cure) from error
