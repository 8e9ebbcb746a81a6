"""Which commit a branch or a tag of the Hub is now: of a model, and of a dataset.

In: a Hub id and a revision. Out: the commit, or a refusal in one sentence. Nothing is downloaded.

Easy to get wrong: a dataset is asked for before `datasets` is imported, so that a Hub out of reach is found in time.
"""

from httpx import HTTPError
from huggingface_hub import HfApi
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from ..recipes.errors import RecipeError
from .hub import files_of
from .hub_client import install_once

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

    def refusal(error: Exception, rule: str, cure: str) -> RecipeError:
        first_line = next(iter(str(error).strip().splitlines()), type(error).__name__)
        return RecipeError(where, rule, got=first_line, cure=cure)

    install_once()
    try:
        return HfApi().dataset_info(name, revision=revision, timeout=_TIMEOUT_SECONDS).sha or revision
    except GatedRepoError as error:
        cure = "Ask for access on its page and run `hf auth login`"
        raise refusal(error, "the dataset must not be gated for you", cure) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        cure = "Check the name, or run `hf auth login` if it is private"
        raise refusal(error, "must be a dataset on the Hub, or a file or folder", cure) from error
    except RevisionNotFoundError as error:
        raise refusal(error, "the revision must exist", f"Check dataset_revision {revision}") from error
    except (OfflineModeIsEnabled, HfHubHTTPError, HTTPError, OSError) as error:
        cure = f"Where it is, run `hf download --repo-type dataset {name} --local-dir DIR`, and name the folder"
        raise refusal(error, "the Hub must be reachable", cure) from error
