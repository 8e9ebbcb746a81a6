"""The failures that people report of quantized checkpoints with MTP, found by the words that a log shows.

In: a line of a log. Out: the `KnownFailure` it tells of, with the name in the line. docs/failures.md has the numbers
(F1, M4).

Easy to get wrong: the first entry that matches is the answer, so their order counts.
"""

import re

from .failure import KnownFailure
from .known_loading import LOADING
from .known_serving import SERVING
from .known_sglang import IN_SGLANG

KNOWN: tuple[KnownFailure, ...] = (*IN_SGLANG, *LOADING, *SERVING)


def known_failure(line: str) -> tuple[KnownFailure, str] | None:
    """The failure that a line tells of, and the name in it ("" for none)."""
    for failure, pattern in _COMPILED:
        if match := pattern.search(line):
            named = next((value for value in match.groupdict().values() if value), "")
            return failure, named
    return None


_COMPILED = tuple((failure, re.compile(failure.words)) for failure in KNOWN)
