"""Relative paths in recipes: a file or folder of the user, or one that ships with keepmtp.

In: a path from a recipe or a command line. Out: the file or folder.

Easy to get wrong: a shipped recipe says `models/tiny-glm4-moe`, and a user runs it from any folder. The current folder
comes first, so that a path that a user typed means what it says.
"""

from pathlib import Path

_MODELS = "models"
_HOME = Path(__file__).parent.parent  # the checkout, or the installed package


def shipped_path(name: str) -> Path | None:
    """The folder of a model that ships with keepmtp; None if none has this name."""
    folder = _HOME / _MODELS / name
    return folder if (folder / "config.json").is_file() and Path(name).name == name else None


def find_path(name: str | Path) -> Path | None:
    """The file or folder in the current folder, else among the shipped models; None if it is in neither."""
    path = Path(name)
    places = (path, _HOME / path) if path.parts[:1] == (_MODELS,) else (path,)
    return next((place for place in places if place.exists()), None)
