"""The refusals of keepmtp. It raises them before it writes a byte.

In: four fields: where, rule, got and cure. Out: an error whose message is one sentence and its cure:
`<where>: <rule>; got <value>. <what to do>.`

Easy to get wrong: the message is for people. Code reads the fields, never the sentence.
"""

from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:  # the callers import it; a refusal alone does not need it
    from pydantic import ValidationError


class KeepMTPError(ValueError):
    """A refusal. The command line prints it as one line, without a traceback.

    Attributes:
        where: the file, tensor, option or command that the rule is about. Empty where only a caller knows it; the
            caller adds it with `at`.
        rule: what must be true.
        got: what is there instead.
        cure: what to do.
    """

    def __init__(self, where: object, rule: str, *, got: object, cure: str) -> None:
        super().__init__(where, rule, got, cure)
        self.where, self.rule, self.got, self.cure = where, rule, got, cure

    def __str__(self) -> str:
        """The house form: `<where>: <rule>; got <got>. <cure>.`"""
        place = f"{self.where}: " if self.where else ""
        return f"{place}{self.rule}; got {self.got}. {self.way_out}"

    @property
    def way_out(self) -> str:
        """The cure as a sentence."""
        return self.cure if self.cure.endswith(("?", ".")) else f"{self.cure}."

    def at(self, where: object) -> Self:
        """The same refusal, with a place in front of its own."""
        return type(self)(f"{where}: {self.where}" if self.where else where, self.rule, got=self.got, cure=self.cure)

    def with_cure(self, cure: str) -> Self:
        """The same refusal, with another cure."""
        return type(self)(self.where, self.rule, got=self.got, cure=cure)


class RecipeError(KeepMTPError):
    """The recipe, the family table or a command line asks for something that is not possible."""


class CheckpointError(KeepMTPError):
    """A file of a checkpoint is missing, broken, or not what its config.json promises."""


class VLLMError(KeepMTPError):
    """There is no vLLM, or none that keepmtp knows, or a server cannot run on this machine now."""


class GateError(KeepMTPError):
    """A result did not pass its gate."""


def first_fault(error: "ValidationError") -> str:
    """The first error of a validation, after its place: `recipe.revision: Field required`."""
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc'])) or 'the whole'}: {first['msg']}"
