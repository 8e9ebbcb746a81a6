"""What ships with keepmtp: where a recipe's relative path leads.

In: a path as a recipe or a command line names it. Out: the file or folder.

Easy to get wrong: a recipe that ships says `models/tiny-glm4-moe`, and is run from anywhere. The current folder comes
first, so that a path somebody typed means what it says.
"""

from pathlib import Path

_MODELS = "models"
_HOME = Path(__file__).parent.parent  # the checkout, or the installed package


def find_path(name: str | Path) -> Path | None:
    """The file or folder of that name in the current folder, else among the shipped models; None if neither has it."""
    path = Path(name)
    places = (path, _HOME / path) if path.parts[:1] == (_MODELS,) else (path,)
    return next((place for place in places if place.exists()), None)
