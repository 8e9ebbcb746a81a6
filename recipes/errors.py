"""The refusals of keepmtp. It raises them before it writes a byte.

In: four fields: where, rule, got and cure. Out: an error whose message is one sentence and its
cure: `<where>: <rule>; got <value>. <what to do>.`

Easy to get wrong: the message is for people. Code reads the fields, never the sentence. The fields
are as they came; the message is cut and `printable`, because a name or a value may be a stranger's.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:  # the callers import it; a refusal alone does not need it
    from pydantic import ValidationError

# The first word of pydantic's name for a fault -> the same in plain words.
_KINDS = {
    **dict.fromkeys(("tuple", "list"), "a list"),
    "dict": "a mapping",
    "model": "a mapping",
    "string": "a text",
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
}
# Key of a recipe of before -> what takes its place.
_GONE = {
    "backend": "Remove it: mse, four-over-six and local-hessian are modelopt's without it",
    "search": "Set calibration.algorithm: gptq or awq, or use W4A16_G32",
    "held_out_by": "Name a dataset of the model's answers, with its prompt_column",
    "min_acceptance": "Set gates.min_acceptance, which judges what was written",
}
MAX_GOT = 300
"""Characters of a value that a message quotes."""
_MAX_PART = 4000


def printable(text: str) -> str:
    r"""A text that moves no cursor, turns no line around and can be encoded.

    Control characters, line breaks, escapes, bidirectional overrides, invisible characters and lone
    surrogates become `\x1b`, `\u202e` and the like, as in Python's `repr`.
    """
    if text.isprintable():
        return text
    shown = ""
    for char in text:
        if not char.isprintable():
            char = char.encode("unicode_escape").decode()
        shown += char
    return shown


def shortened(text: str, limit: int = MAX_GOT) -> str:
    """A text, `printable`, of at most about `limit` characters; a longer one says how long it
    was.
    """
    if len(text) > limit:
        return f"{printable(text[:limit])[:limit]}... ({len(text)} characters)"
    return printable(text)


def counted(number: int, what: str) -> str:
    """`1 warning`, `2 warnings`."""
    if number == 1:
        return f"1 {what}"
    return f"{number:,} {what}s"


class KeepMTPError(ValueError):
    """A refusal. The command line prints it as one line, without a traceback.

    Attributes:
        where: the file, tensor, option or command that the rule is about. Empty where only a caller
            knows it; the caller adds it with `at`.
        rule: what must be true.
        got: what is there instead.
        cure: what to do.
    """

    def __init__(self, where: object, rule: str, *, got: object, cure: str) -> None:
        super().__init__(where, rule, got, cure)
        self.where = where
        self.rule = rule
        self.got = got
        self.cure = cure

    def __str__(self) -> str:
        """The house form: `<where>: <rule>; got <got>. <cure>.`"""
        rule = self.rule
        if self.where:
            rule = f"{self.where}: {rule}"
        rule = shortened(rule, _MAX_PART)
        cure = shortened(self.way_out, _MAX_PART)
        return f"{rule}; got {shortened(str(self.got))}. {cure}"

    @property
    def way_out(self) -> str:
        """The cure as a sentence."""
        if self.cure.endswith(("?", ".")):
            return self.cure
        return f"{self.cure}."

    def at(self, where: object) -> Self:
        """The same refusal, with a place in front of its own."""
        if self.where:
            where = f"{where}: {self.where}"
        return type(self)(where, self.rule, got=self.got, cure=self.cure)

    def with_cure(self, cure: str) -> Self:
        """The same refusal, with another cure."""
        return type(self)(self.where, self.rule, got=self.got, cure=cure)


class RecipeError(KeepMTPError):
    """The recipe, the family table or a command line asks for something that is not possible."""


class CheckpointError(KeepMTPError):
    """A file of a checkpoint is missing, broken, or not what its config.json promises."""


class NoCheckpointError(CheckpointError):
    """There is no checkpoint at this place, or nobody can reach it from here. Nothing is known of
    its files.
    """


class VLLMError(KeepMTPError):
    """There is no vLLM, or none that keepmtp knows, or a server cannot run on this machine now."""


class GateError(KeepMTPError):
    """A result did not pass its gate."""


def folded(name: str) -> str:
    """A name without the differences that do not count on the command line, as folders have it."""
    return name.casefold().replace("_", "-")


def did_you_mean(
    word: object, known: Iterable[str], *, otherwise: str, cutoff: float = 0.75
) -> str:
    """A cure that suggests the nearest known name, if one is as near as `cutoff`, up to 1."""
    said = folded(str(word))
    names = {folded(str(name)): name for name in known}
    near = get_close_matches(said, names, n=1, cutoff=cutoff)
    if said and not near:
        longer = [name for name in names if name.startswith(f"{said}-")]
        longer += [name for name in names if name.endswith(f"-{said}")]
        shorter = [name for name in names if f"-{name}-" in f"-{said}-"]
        # The longest part of the word; else a name that it is a part of.
        near = [*sorted(shorter, key=len, reverse=True)[:1], *longer]
    if not near:
        return otherwise
    return f"Did you mean {names[near[0]]}?"


def cure_of_key(key: str, known: Collection[str]) -> str:
    """A cure for an unknown key: what took its place, the one that it is near to, or all that there
    are.
    """
    if key in _GONE:
        return _GONE[key]
    return did_you_mean(key, known, otherwise=f"The keys are {', '.join(known)}")


def first_fault(error: "ValidationError") -> str:
    """The first error of a validation, after its place: `recipe.revision: Field required`."""
    first = error.errors()[0]
    says = getattr(first.get("ctx", {}).get("error"), "rule", plain_rule(first))
    # Where it takes several types, the path has pydantic's name of one.
    path = [
        str(part) for part in first["loc"] if not str(part).startswith(("constrained-", "list["))
    ]
    where = ".".join(path)
    return f"{where or 'the whole'}: {says}"


def allowed_words(fault: Mapping[str, Any]) -> list[str]:
    """The words that pydantic or typer would take; none where it is not about a choice."""
    words = fault.get("ctx", {}).get("expected")
    if not words:
        words = fault["msg"].partition(" is not one of ")[2]
    return re.findall("'([^']+)'", words)


def plain_rule(fault: Mapping[str, Any]) -> str:
    """What pydantic asks for, in the words of a person who has not read its types: `must be a
    list`.
    """
    words = allowed_words(fault)
    if len(words) == 1:
        return f"must be {words[0]}"
    if words:
        return f"must be one of {', '.join(words)}"
    if fault["type"].endswith("too_short"):
        return "must not be empty"
    kind = _KINDS.get(fault["type"].partition("_")[0])
    if kind is not None and not fault["type"].endswith("too_long"):
        return f"must be {kind}"
    return re.sub("^(Input|String|List) should", "must", fault["msg"])


def size_in_words(size: int) -> str:
    """Bytes for people: GiB, or MiB and KiB for small ones."""
    if not size:
        return "-"
    if size >= 2**30 // 10:
        return f"{size / 2**30:,.1f} GiB"
    if size >= 2**20 // 10:
        return f"{size / 2**20:,.1f} MiB"
    return f"{size / 1024:,.1f} KiB"
