"""`keepmtp ls`: the models that have recipes on one screen; or one model, every recipe, the
schemes, the families.

In: nothing, a model's name, or the name of a listing. Out: plain lines, a table, or JSON.

Easy to get wrong: people type this command first, so it must answer at once. It lists recipes
without validating them, and reads its argument itself: typer 0.29 loads pydantic for an argument.
"""

import sys
import textwrap
from collections.abc import Iterable
from shutil import get_terminal_size

import typer

from ..recipes.errors import RecipeError, did_you_mean
from ..recipes.frozen import Json
from ..recipes.model_file import BATCHES, listed
from .options import JsonOption

# Listing -> the columns of its table.
COLUMNS = {
    "models": ("recipe", "default", "batches", "what"),
    "schemes": ("scheme", "bits", "batches", "what"),
    "families": ("family", "backbone", "mtp", "proof"),
}
_TITLES = {
    "models": "models (default: what the bare model name means)",
    "schemes": "schemes (bits: per weight, on disk)",
    "families": "families (what can be calibrated: docs/tables/families.md)",
}
_LEAST_WIDTH = 40
_CELLS = {True: "*", False: ""}


def ls(context: typer.Context, as_json: JsonOption = False) -> None:
    """List the models that have recipes, with their variants; or one model, the schemes, the
    families.

    WHAT is a model's name: its variants, what each one does, and the command that runs it. Or it is
    a listing: models (every recipe in a row), schemes, or families. Without it there is a row for
    each model.

    With --json and without WHAT, all three listings are printed for machines.

    \b
    Example: `keepmtp ls glm-4.7`
    """
    what = " ".join(context.args)
    recipes = listed()
    chosen = [recipe for recipe in recipes if what in (recipe["model"], recipe["recipe"])]
    if what and not chosen and what not in COLUMNS:
        names = [*COLUMNS, *(recipe["model"] for recipe in recipes)]
        raise RecipeError(
            "ls",
            f"must be one of {', '.join(COLUMNS)}, or a model's name",
            got=repr(what),
            cure=did_you_mean(what, names, otherwise="Run `keepmtp ls`"),
        )
    if not as_json and not what:
        lines = screen(recipes, max(_LEAST_WIDTH, get_terminal_size().columns))
        sys.stdout.write("\n".join([*lines, ""]))
        return
    from .tables import answer, table

    names = list(COLUMNS)
    if what:
        names = ["models"]
    if what in COLUMNS:
        names = [what]
    found = {}
    tables = []
    for name in names:
        found[name] = chosen or recipes
        if name in _OTHERS:
            found[name] = _OTHERS[name]()
        cells = []
        for row in found[name]:
            cells.append([_CELLS.get(row[column], row[column]) for column in COLUMNS[name]])
        title = _TITLES[name]
        if chosen and name == "models":
            title += f", family {chosen[0]['family']}, source {chosen[0]['source']}"
        listing = table(title, COLUMNS[name], cells)
        listing.columns[0].no_wrap = True  # a name that is copied
        tables.append(listing)
    answer(found, tables, as_json=as_json)


def screen(recipes: Iterable[Json], width: int) -> list[str]:
    """One line for each model: its name and its variants."""
    variants = {"model": ["variants (* what the bare model name means)"]}
    for recipe in recipes:
        name = recipe["variant"]
        if recipe["default"]:
            name += "*"
        variants.setdefault(recipe["model"], []).append(name)
    indent = max(map(len, variants)) + 2
    lines = []
    for model, names in variants.items():
        lines += textwrap.wrap(
            "  ".join(names),
            width,
            initial_indent=f"{model:<{indent}}",
            subsequent_indent=" " * indent,
            break_on_hyphens=False,
        )
    return [
        *lines,
        "",
        "One of them: keepmtp ls MODEL.",
        "More: ls models, ls schemes, ls families",
    ]


def scheme_rows() -> list[Json]:
    """A row for each scheme."""
    from ..recipes.schemes import SCHEMES, num_bytes

    found = []
    for scheme in SCHEMES.values():
        # Bits on disk for each weight, scales included, of a 4096 x 4096 matrix.
        size = 0
        for spec in scheme.tensors(4096, 4096):
            size += num_bytes(spec.dtype, spec.shape)
        row = {
            "scheme": scheme.name,
            "bits": f"{8 * size / 4096**2:.2f}",
            "batches": BATCHES[scheme.needs_calibration],
            "what": f"{scheme.summary}. Runs on {scheme.hardware}.",
        }
        found.append(row)
    return found


def family_rows() -> list[Json]:
    """A row for each family, and for each that drafts by DSpark."""
    from ..recipes.families import families, why_not_calibrated

    found = {}
    dspark = [family.dspark for family in families().values() if family.dspark]
    for family in (*families().values(), *dspark):
        backbone = family.no_backbone or why_not_calibrated(family)
        mtp = backbone or family.no_draft
        names = ", ".join((family.model_type, *family.also))
        if family.architectures:
            names += f" ({', '.join(family.architectures)})"
        if family.method == "dspark":
            names += " with DSpark"
        row = {
            "family": names,
            "backbone": "yes",
            "mtp": "yes",
            "proof": "-",
            "why_not_backbone": backbone,
            "why_not_mtp": mtp,
        }
        if backbone:
            row["backbone"] = "no"
        if mtp:
            row["mtp"] = "no"
        elif family.draft is not None:
            row["proof"] = family.draft.proof
        found[family.model_type, family.architectures, family.method] = row
    return [found[name] for name in sorted(found)]


_OTHERS = {"schemes": scheme_rows, "families": family_rows}
