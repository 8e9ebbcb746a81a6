"""`keepmtp pin`: the commits that a recipe's branches are now, written into it.

In: a recipe file, or the name of a recipe that ships. Out: the file or a copy, and what was
changed.

Easy to get wrong: a recipe that ships with keepmtp is never changed in its place.
"""

import difflib
import sys
from pathlib import Path
from typing import Annotated

import typer

from ..recipes.errors import RecipeError, printable


def pin(
    recipe: Annotated[
        str, typer.Argument(help="A recipe file, or a model's name. See `keepmtp ls`.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", help="Write a copy; default: the file itself. Needed for a model's name."
        ),
    ] = None,
) -> None:
    """Write into a recipe the commits that its model and its datasets have now, so that every run
    reads the same.

    Comments stay. What changes is printed. A revision that is a commit already is left alone.

    Example: `keepmtp pin glm-4.7 --out glm-4.7.yaml`
    """
    from ..checkpoints.files import write_whole
    from ..checkpoints.hub import dataset_commit, files_of
    from ..recipes.find import is_file_name, named_file
    from ..recipes.pinned import pinned_text

    file, _ = named_file(recipe)
    if out is None and not is_file_name(recipe):
        rule = "must name the copy of a recipe that ships with keepmtp"
        raise RecipeError(
            "--out", rule, got="none", cure=f"Give --out {recipe.rpartition('/')[2]}.yaml"
        )
    if out is not None and out.exists():
        raise RecipeError(
            "--out", "an existing file is never overwritten", got=out, cure="Choose another --out"
        )

    def commit_of(kind: str, name: str, revision: str) -> str:
        if kind == "model":
            return files_of(name, revision)[0]
        return dataset_commit(name, revision, f"{file.path}: dataset {name}")

    text = file.path.read_text()
    pinned = pinned_text(text, commit_of)
    target = out or file.path
    names = str(file.path), str(target)
    changes = difflib.unified_diff(text.splitlines(), pinned.splitlines(), *names, n=0, lineterm="")
    for line in list(changes) or [f"{file.path}: no revision moves"]:
        sys.stdout.write(f"{printable(line)}\n")
    if out is not None or pinned != text:
        write_whole(target, pinned)
