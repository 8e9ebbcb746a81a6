"""Which packages a job needs, checked before the job begins.

In: the name of one of keepmtp's extras. Out: nothing, or a refusal that says what to install. The
list comes from the metadata of the installed package, so it is the list that pip used. The check
imports no package, so it is fast.

Easy to get wrong: an extra may include another (`keepmtp[quantize]`). A package with the wrong
version is missing.
"""

import shlex
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distributions, requires, version

from packaging.requirements import Requirement

from .errors import RecipeError

_PACKAGE = "keepmtp"


def requirements(extra: str) -> list[Requirement]:
    """What an extra adds to the base install, directly or through another extra.

    Args:
        extra: a name from `project.optional-dependencies` of pyproject.toml.
    """
    return [needed for needed in _declared(extra) if needed.name != _PACKAGE]


def missing(extra: str) -> list[str]:
    """The packages of an extra that are not installed: "torch", or "torch>=2.8" where the version
    is wrong.
    """
    absent: set[str] = set()
    for needed in requirements(extra):
        try:
            if not needed.specifier.contains(version(needed.name), prereleases=True):
                absent.add(f"{needed.name}{needed.specifier}")
        except PackageNotFoundError:
            absent.add(needed.name)
    return sorted(absent)


def require_extra(where: object, extra: str) -> None:
    """Refuse if a package is missing.

    Args:
        where: the job that needs the extra.
        extra: name of the extra.

    Raises:
        RecipeError: names the missing packages and the command that installs them.
    """
    absent = missing(extra)
    if absent:
        raise RecipeError(
            where,
            f"needs keepmtp's `{extra}` extra",
            got=f"no {' and no '.join(absent)}",
            cure=f"Run {install_command(extra)}",
        )


def install_command(extra: str) -> str:
    """The command that adds an extra to this installation of keepmtp, pasted anywhere.

    keepmtp is on no package index. It is installed here, so pip and uv take it as it is, and fetch
    what the extra adds. A `pip` of another Python would look for keepmtp itself, so this Python is
    named.
    """
    wanted = f"'{_PACKAGE}[{extra}]'"
    python = shlex.quote(sys.executable)
    # Asked of the metadata: setuptools takes a search for the module as pip at work and drops its
    # own distutils. Then torch's extensions, and so modelopt, cannot be imported any more.
    if any(distributions(name="pip")):
        return f"{python} -m pip install {wanted}"
    return f"uv pip install {wanted} --python {python}"


def _declared(extra: str) -> Iterator[Requirement]:
    for line in requires(_PACKAGE) or ():
        needed = Requirement(line)
        if needed.marker is not None and needed.marker.evaluate({"extra": extra}):
            yield needed
            if needed.name == _PACKAGE:
                for included in needed.extras:
                    yield from _declared(included)
