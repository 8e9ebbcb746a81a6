"""`keepmtp ls`: the models that have recipes on one screen; or one model, every recipe, the
schemes, the families.

In: nothing, a model's name, or the name of a listing. Out: plain lines, a table, or JSON.

Easy to get wrong: people type this command first, so it must answer at once. It lists recipes
without validating them, and reads its argument itself: typer 0.29 loads pydantic for an argument.
"""

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from shutil import get_terminal_size

import typer

from ..recipes.errors import RecipeError, did_you_mean
from ..recipes.extras import install_command
from ..recipes.frozen import Json
from ..recipes.model_file import Listed, listed
from .options import JsonOption

# Listing -> the columns of its table.
COLUMNS = {
    "models": ("recipe", "batches", "what"),
    "schemes": ("scheme", "bits", "batches", "what"),
    "families": ("family", "plan", "check", "backbone", "mtp", "proof"),
}
# Columns whose keys are too short for people.
_HEADS: Mapping[str, str] = {
    "bits": ">bits",
    "backbone": "calibrate backbone",
    "mtp": "calibrate MTP",
}
_TITLES = {
    "models": "models (* what the bare model name means)",
    "schemes": "schemes (bits: per weight, on disk)",
}
_MORE = {
    "families": [
        "proof: what the draft was compared with. Why not, and notes: --json, and docs/families.md."
    ]
}
_LEAST_WIDTH = 40
_BATCHES = {True: "needed", False: "-"}


def ls(context: typer.Context, as_json: JsonOption = False) -> None:
    """List the models that have recipes, with their variants; or one model, the schemes, the
    families.

    WHAT is a model's name: its variants, what each one does, and the command that runs it. Or it is
    a listing: models (every recipe in a row), schemes, or families. Without it there is a row for
    each model.

    With --json and without WHAT, all three listings are printed for machines.

    Example: `keepmtp ls glm-4.7`
    """
    if len(context.args) > 1:
        raise RecipeError(
            "ls", "shows one model or listing", got=" ".join(context.args), cure="Run it for each"
        )
    what = "".join(context.args)
    recipes = listed()
    chosen = [recipe for recipe in recipes if what in (recipe.model, recipe.name)]
    width = max(_LEAST_WIDTH, get_terminal_size().columns)
    if what and not chosen and what not in COLUMNS:
        names = [*COLUMNS, *(recipe.model for recipe in recipes)]
        raise RecipeError(
            "ls",
            f"must be one of {', '.join(COLUMNS)}, or a model's name",
            got=repr(what),
            cure=did_you_mean(what, names, otherwise="Run `keepmtp ls`"),
        )
    if as_json:
        _print_json(what, chosen or recipes)
    elif what in COLUMNS:
        _print_listing(what, recipes)
    elif chosen:
        typer.echo("\n".join(details(chosen, width)))
    else:
        typer.echo("\n".join(screen(recipes, width)))


def _print_json(what: str, recipes: Sequence[Listed]) -> None:
    from .tables import print_json

    names = list(COLUMNS)
    if what in COLUMNS:
        names = [what]
    elif what:
        names = ["models"]
    print_json({name: rows(name, recipes) for name in names})


def _print_listing(what: str, recipes: Sequence[Listed]) -> None:
    from .tables import show, table

    cells = []
    for row in rows(what, recipes):
        line = [row[column] for column in COLUMNS[what]]
        if row.get("default"):
            line[0] += " *"
        cells.append(line)
    heads = [_HEADS.get(column, column) for column in COLUMNS[what]]
    show([table(_TITLES.get(what, what), heads, cells), *_MORE.get(what, ())])


def screen(recipes: Iterable[Listed], width: int) -> list[str]:
    """One line for each model: its name and its variants."""
    variants = {"model": ["variants (* what the bare model name means)"]}
    for recipe in recipes:
        name = recipe.variant
        if recipe.is_default:
            name += "*"
        variants.setdefault(recipe.model, []).append(name)
    indent = max(map(len, variants)) + 2
    lines = []
    for model, names in variants.items():
        lines += _wrapped("  ".join(names), width, first=f"{model:<{indent}}", then=" " * indent)
    more = "One of them: keepmtp ls MODEL. More: keepmtp ls models, schemes or families."
    return [*lines, "", *_wrapped(more, width)]


def details(variants: Sequence[Listed], width: int) -> list[str]:
    """One model: its family and source, and for each variant what it does and the command that runs
    it.
    """
    model = variants[0]
    lines = [model.model, f"  family  {model.family}", f"  source  {model.source}"]
    for recipe in variants:
        title = recipe.variant
        name = recipe.name
        if recipe.is_default:
            title += " (default)"
            name = recipe.model
        batches = "no batches needed"
        if recipe.needs_batches:
            batches = "batches needed"
        lines += ["", f"{title}: {batches}", *_wrapped(recipe.summary, width, "  ", "  ")]
        lines.append(f"  keepmtp quantize {name}")
    if any(recipe.needs_batches for recipe in variants):
        why = "Batches are text that the model runs on first, to calibrate it. That needs"
        lines += ["", *_wrapped(why, width), f"  {install_command('calibrate')}"]
    return lines


def rows(listing: str, recipes: Iterable[Listed]) -> list[Json]:
    """A listing for machines: the columns of its table, and more."""
    if listing == "schemes":
        return _schemes()
    if listing == "families":
        return _families()
    found = []
    for recipe in recipes:
        found.append(
            {
                "recipe": recipe.name,
                "model": recipe.model,
                "variant": recipe.variant,
                "default": recipe.is_default,
                "family": recipe.family,
                "source": recipe.source,
                "batches": _BATCHES[recipe.needs_batches],
                "what": recipe.summary,
            }
        )
    return found


def _schemes() -> list[Json]:
    from ..recipes.schemes import SCHEMES, SEARCHES, num_bytes

    found = []
    for scheme in SCHEMES.values():
        # Bits on disk for each weight, scales included, of a 4096 x 4096 matrix.
        size = 0
        for spec in scheme.tensors(4096, 4096):
            size += num_bytes(spec.dtype, spec.shape)
        row = {
            "scheme": scheme.name,
            "bits": f"{8 * size / 4096**2:.2f}",
            "batches": _BATCHES[scheme.needs_calibration],
            "what": f"{scheme.summary}. Runs on {scheme.hardware}.",
            "searches": [search for search, schemes in SEARCHES.items() if scheme.name in schemes],
        }
        found.append(row)
    return found


def _families() -> list[Json]:
    from ..recipes.families import families, support_of

    found = {}
    for family in families().values():
        support = support_of(family)
        names = ", ".join((family.model_type, *family.also))
        if family.architectures:
            names += f" ({', '.join(family.architectures)})"
        row = {
            "family": names,
            "plan": "yes",
            "check": "yes",
            "backbone": "yes",
            "mtp": "yes",
            "proof": support.proof,
            "why_not_backbone": support.backbone,
            "why_not_mtp": support.mtp,
            "what": family.notes,
        }
        if support.backbone:
            row["backbone"] = "no"
        if support.mtp:
            row |= {"mtp": "no", "proof": "-"}
        found[family.model_type, family.architectures] = row
    return [found[name] for name in sorted(found)]


def _wrapped(text: str, width: int, first: str = "", then: str = "") -> list[str]:
    """Lines of at most `width` columns, broken only between words: names have hyphens."""
    return textwrap.wrap(
        text,
        width,
        initial_indent=first,
        subsequent_indent=then,
        break_on_hyphens=False,
        break_long_words=False,
    )
