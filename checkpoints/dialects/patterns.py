"""The entries of a quantization config, and the first one that matches a name.

In: names, and `re:` expressions from anybody. Out: the entry that matched, or a refusal that names
the expression.

Easy to get wrong: an expression such as `re:([a-z0-9._]+)*!` tries every way to cut a name, and
never comes to an end.
"""

import re
from collections.abc import Iterable
from functools import cache

from ...recipes.errors import CheckpointError, shortened
from ...recipes.match_clock import SIMPLER, MatchClock


def _hangs(entry: str, got: str) -> CheckpointError:
    rule = (
        "must be matched in a moment; vLLM matches it to each module, without a time limit, and "
        "would hang"
    )
    return CheckpointError(shortened(entry), rule, got=got, cure=SIMPLER)


# vLLM has no time limit, so it hangs. Ours is of processor time, counted by a timer that interrupts
# `re` itself: another regex engine would be quick where vLLM's is not.
_clock = MatchClock(_hangs)
time_limit = _clock.limit


def equal_or_regex(name: str, entry: str) -> bool:
    """compressed-tensors' comparison of one name with one entry.

    Raises:
        CheckpointError: the entry is no regular expression, or takes too long to match.
    """
    if _is_regex(entry):
        return _matches(entry, name)
    return entry == name


def matches_start(name: str, expression: str) -> bool:
    """Whether an expression matches the start of a name; the errors are those of
    `equal_or_regex`.
    """
    return _matches(f"re:{expression}", name)


def matches_inside(name: str, expression: str) -> bool:
    """Whether an expression matches somewhere in a name; the errors are those of
    `equal_or_regex`.
    """
    entry = f"re:{expression}"
    return _clock.timed(_compiled(entry).search, entry, name) is not None


class Entries:
    """Names and `re:` expressions in their order; a whole name is looked up, not compared one by
    one.
    """

    def __init__(self, written: Iterable[str]) -> None:
        """Take them.

        Raises:
            CheckpointError: an entry says that it is a regular expression, and is none. vLLM raises
                on it too, for the first module that it builds.
        """
        self.written = tuple(written)
        self._regexes = list[tuple[int, str]]()
        self._places = dict[str, int]()
        for at, entry in enumerate(self.written):
            if _is_regex(entry):
                _compiled(entry)
                self._regexes.append((at, entry))
            else:
                self._places.setdefault(entry, at)
        self._of_class = dict[str, str | None]()

    def first(self, name: str) -> str | None:
        """The first entry that is the name, or matches its start."""
        place = self._places.get(name, len(self.written))
        for at, entry in self._regexes:
            if at < place and _matches(entry, name):
                return entry
        if name in self._places:
            return name
        return None

    def first_for_class(self, name: str) -> str | None:
        """The first entry for a class of vLLM's: a part of the class's name is enough."""
        if name not in self._of_class:
            self._of_class[name] = None
            low = name.lower()
            for entry in self.written:
                is_hit = entry.lower() in low
                if _is_regex(entry):
                    is_hit = _matches(entry, name)
                if is_hit:
                    self._of_class[name] = entry
                    break
        return self._of_class[name]


def _is_regex(entry: str) -> bool:
    return entry.startswith("re:")


def _matches(entry: str, name: str) -> bool:
    return _clock.timed(_compiled(entry).match, entry, name) is not None


@cache
def _compiled(entry: str) -> re.Pattern[str]:
    try:
        return _clock.timed(re.compile, entry, entry[3:])
    except (re.error, OverflowError, RecursionError) as error:
        rule = "must be a regular expression, or vLLM raises"
        raise CheckpointError(shortened(entry), rule, got=str(error), cure="Mend it") from error
