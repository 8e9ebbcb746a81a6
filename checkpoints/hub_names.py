"""Names of repositories as people write them, read without the Hub's client, which is slow to
load.
"""

import re

_PAGE = re.compile(
    r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/([^/?#]+/[^/?#]+)"
    r"(?:/(?:tree|blob|resolve)/([^/?#]+)[^?#]*)?/?(?:[?#].*)?"
)


def page_of(address: str) -> tuple[str, str | None] | None:
    """The Hub id and the revision that the address of a repository's page names; None for any other
    word.
    """
    page = _PAGE.fullmatch(address)
    return (page[1], page[2]) if page else None


def is_repo_id(name: str) -> bool:
    """Whether the Hub can have a repository ORG/NAME of this name."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return name.count("/") == 1
