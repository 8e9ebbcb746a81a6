"""The ways keepmtp says no, all of them before a byte is written.

Every message is one sentence and its cure: `<where>: <rule>; got <value>. <what to do>.`
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # its callers have it; whoever only refuses does not need it
    from pydantic import ValidationError


class KeepMTPError(ValueError):
    """What the command line prints as one line, without a traceback."""


class RecipeError(KeepMTPError):
    """The recipe, the family table or a command-line choice asks for something that cannot be done."""


class CheckpointError(KeepMTPError):
    """A file of the source checkpoint is missing, broken or not what its config.json promises."""


class VLLMError(KeepMTPError):
    """There is no vLLM to ask, or not one that keepmtp knows, or a server cannot be started beside what runs here."""


class GateError(KeepMTPError):
    """A result did not pass its gate."""


def refuse(where: object, rule: str, got: object, cure: str) -> str:
    """The house form of a refusal: `<where>: <rule>; got <got>. <cure>.`"""
    stop = "" if cure.endswith(("?", ".")) else "."
    return f"{where}: {rule}; got {got}. {cure}{stop}"


def first_fault(error: "ValidationError") -> str:
    """The first thing that is not as a file's form wants it, with its place: `recipe.revision: Field required`."""
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc'])) or 'the whole'}: {first['msg']}"
