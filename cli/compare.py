"""`keepmtp compare`: finished checkpoints of one model next to each other, without a GPU.

In: checkpoints. Out: tables with a column for each, or JSON.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import RenderableType

from . import exits
from .options import JsonOption, PathsArgument
from .progress import live_line
from .tables import answer, drawn

if TYPE_CHECKING:
    from ..validate.report.comparison import Comparison


def compare(paths: PathsArgument, as_json: JsonOption = False) -> None:
    """Show finished checkpoints of one model next to each other: bytes, what loads them, what was
    measured.

    From headers alone: bytes by group and scheme, the KV cache, and which versions of vLLM load it
    by the rules of the static check; `keepmtp check A B --gpu sm100` lets vLLM's own classes load
    them.

    Where a checkpoint has a NAME.report of the same bytes, its scores, divergence, acceptance and
    speed are shown.

    Exit status 0, whatever the checkpoints are like; 2 if one cannot be read, or is of another
    model.

    \b
    Example: `keepmtp compare out/A out/B nvidia/GLM-4.7-NVFP4`
    """
    from .. import api

    # Of a repository, threads fetch: Ctrl-C ends them, too.
    with live_line() as doing, exits.soon():
        doing("reading headers")
        found = api.compare(paths, progress=doing)
    answer(found, _parts(found), as_json=as_json)


def _parts(found: "Comparison") -> Iterator[RenderableType]:
    """Tables with a column for each, then what to know of them."""
    from ..validate.report.comparison import notes, sections

    for heading, table in sections(found):
        yield drawn(heading, table)
    yield from notes(found)
