"""Pages of docs/tables: words that people write, and after a mark what `make docs` writes."""

from collections.abc import Iterable
from pathlib import Path

MARK = "<!-- written by make docs -->\n"


def with_part(page: Path, part: str) -> str:
    """The page with this part after its mark."""
    return f"{page.read_text().partition(MARK)[0]}{MARK}\n{part}\n"


def table(names: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head, *lines = (f"| {' | '.join(cells)} |" for cells in (names, *rows))
    return "\n".join([head, "|---" * len([*names]) + "|", *lines])


def numbered(reasons: Iterable[str]) -> str:
    return "\n".join(f"{number}. {reason}" for number, reason in enumerate(reasons, 1))
