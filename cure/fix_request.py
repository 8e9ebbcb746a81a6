"""A pull request on the Hub with what fix proposes for a repository.

In: an `Outcome` of a repository. Out: the address of the pull request. Its files are small; no weight is sent.

Easy to get wrong: a pull request is public, and somebody else reads it. So it says what is changed and why, what the
check says before and after, and that no weight was read.
"""

from collections.abc import Callable

from ..checkpoints.hub_client import stopped_by_signals
from ..recipes.errors import RecipeError
from ..validate.publish.hub import Hub
from .fix import Outcome

_MESSAGE = "Fix what vLLM cannot load, or loads as something else"


def refuse_request(outcome: Outcome) -> None:
    """Refuse what no pull request can hold.

    Raises:
        RecipeError: a folder, or nothing to change.
    """
    if outcome.source.folder is not None:
        got, cure = "a folder", "Name the repository ORG/NAME, or use --out"
        raise RecipeError("--pr", "is for a repository on the Hub", got=got, cure=cure)
    if not outcome.proposal.edits:
        got = "nothing that fix can cure there"
        raise RecipeError("--pr", "needs something to change", got=got, cure="Leave out --pr")


def request(outcome: Outcome, token: str, *, watch: Callable[[str], None]) -> str:
    """Open the pull request; returns its address.

    Args:
        outcome: of a repository, after `refuse_request`.
        token: may open pull requests; one for reading may not.
        watch: called with words about what is waited for.

    Raises:
        HubError: the token is not valid or may not, the Hub does not answer, or the repository has moved on.
    """
    hub = Hub(token, watch=watch)
    with stopped_by_signals():
        hub.sign_in()
        return hub.request(
            outcome.source.where,
            outcome.proposal.files(),
            parent=outcome.source.revision,
            message=_MESSAGE,
            description=description(outcome),
        )


def description(outcome: Outcome) -> str:
    """What the pull request says: faults, reasons, and how it was judged."""
    cured = [f"- `{each.where}`: {each.says}" for each in outcome.cured]
    left = [f"- `{each.where}`: {each.says}" for each in outcome.left if each.severity == "error"]
    reasons = [f"- {why}" for why in dict.fromkeys(edit.why for edit in outcome.proposal.edits)]
    parts = ["What `keepmtp check` found:", *cured, "", "What this changes, and why:", *reasons]
    if left:
        parts += ["", "What it cannot cure:", *left]
    return "\n".join([*parts, "", "Made by `keepmtp fix` from config.json and headers. No weight was read or changed."])
