"""What pip must have installed for a job, asked before the job begins.

In: the name of one of keepmtp's extras. Out: nothing, or a refusal that says what to install. The list is the installed
package's own metadata, so it cannot differ from what pip was told. Nothing is imported, so that asking costs little.

Easy to get wrong: an extra may include another (`keepmtp[quantize]`), and a package of the wrong version is missing.
"""

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement

from .errors import RecipeError

_PACKAGE = "keepmtp"


def requirements(extra: str) -> list[Requirement]:
    """What an extra adds to the base install, with what the extras that it includes add.

    Args:
        extra: a name from `project.optional-dependencies` of pyproject.toml.
    """
    return [needed for needed in _declared(extra) if needed.name != _PACKAGE]


def missing(extra: str) -> list[str]:
    """What an extra needs and is not there: "torch", or "torch>=2.8" where the version is another."""
    return sorted({lack for needed in requirements(extra) if (lack := _lack(needed))})


def require_extra(where: object, extra: str, *, otherwise: str = "") -> None:
    """Refuse where a package is missing.

    Args:
        where: what needs it.
        extra: of keepmtp.
        otherwise: what can be done without it, as words behind "or".

    Raises:
        RecipeError: names the packages, and what to install.
    """
    if absent := missing(extra):
        cure = f"Run pip install 'keepmtp[{extra}]'" + (f", or {otherwise}" if otherwise else "")
        raise RecipeError(where, f"needs keepmtp's `{extra}` extra", got=f"no {' and no '.join(absent)}", cure=cure)


def _declared(extra: str) -> Iterator[Requirement]:
    for line in requires(_PACKAGE) or ():
        needed = Requirement(line)
        if needed.marker is not None and needed.marker.evaluate({"extra": extra}):
            yield needed
            if needed.name == _PACKAGE:
                for included in needed.extras:
                    yield from _declared(included)


def _lack(needed: Requirement) -> str:
    try:
        is_met = needed.specifier.contains(version(needed.name), prereleases=True)
    except PackageNotFoundError:
        return needed.name
    return "" if is_met else f"{needed.name}{needed.specifier}"
