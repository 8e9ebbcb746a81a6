"""The ways keepmtp says no, all of them before a byte is written.

Every message is one sentence and its cure: `<where>: <rule>; got <value>. <what to do>.`
"""

from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:  # its callers have it; whoever only refuses does not need it
    from pydantic import ValidationError


class KeepMTPError(ValueError):
    """A refusal. The command line prints it as one line, without a traceback.

    Attributes:
        where: the file, tensor, option or station that the rule is about. Empty while only a caller knows it: `at`
            gives it then.
        rule: what must hold.
        got: what was there instead.
        cure: what to do.
    """

    def __init__(self, where: object, rule: str, *, got: object, cure: str) -> None:
        super().__init__(where, rule, got, cure)
        self.where, self.rule, self.got, self.cure = where, rule, got, cure

    def __str__(self) -> str:
        """The house form: `<where>: <rule>; got <got>. <cure>.`"""
        place = f"{self.where}: " if self.where else ""
        stop = "" if self.cure.endswith(("?", ".")) else "."
        return f"{place}{self.rule}; got {self.got}. {self.cure}{stop}"

    def at(self, where: object) -> Self:
        """The same refusal, at a place that its maker did not know."""
        return type(self)(f"{where}: {self.where}" if self.where else where, self.rule, got=self.got, cure=self.cure)

    def with_cure(self, cure: str) -> Self:
        """The same refusal with another way out."""
        return type(self)(self.where, self.rule, got=self.got, cure=cure)


class RecipeError(KeepMTPError):
    """The recipe, the family table or a command-line choice asks for something that cannot be done."""


class CheckpointError(KeepMTPError):
    """A file of the source checkpoint is missing, broken or not what its config.json promises."""


class VLLMError(KeepMTPError):
    """There is no vLLM to ask, or not one that keepmtp knows, or a server cannot be started beside what runs here."""


class GateError(KeepMTPError):
    """A result did not pass its gate."""


def first_fault(error: "ValidationError") -> str:
    """The first thing that is not as a file's form wants it, with its place: `recipe.revision: Field required`."""
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc'])) or 'the whole'}: {first['msg']}"
