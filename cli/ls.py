"""`keepmtp ls`: the models that have recipes on one screen; or one model, every recipe, the
schemes, the families.

In: nothing, a model's name, or the name of a listing. Out: plain lines, a table, or JSON.

Easy to get wrong: people type this command first, so it must answer at once. It lists recipes
without validating them, and reads its argument itself: typer 0.29 loads pydantic for an argument.
"""

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
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
_CAN = {True: "yes", False: "no"}


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
    if what and not chosen and what not in COLUMNS:
        names = [*COLUMNS, *dict.fromkeys(recipe.model for recipe in recipes)]
        raise RecipeError(
            "ls",
            f"must be one of {', '.join(COLUMNS)}, or a model's name",
            got=repr(what),
            cure=did_you_mean(what, names, otherwise="Run `keepmtp ls`"),
        )
    if as_json:
        from .tables import print_json

        names = list(COLUMNS)
        if what in COLUMNS:
            names = [what]
        elif what:
            names = ["models"]
        print_json({name: rows(name, chosen or recipes) for name in names})
    elif what in COLUMNS:
        from .tables import show, table

        columns = COLUMNS[what]
        cells = []
        for row in rows(what, recipes):
            first, *others = (row[column] for column in columns)
            cells.append([f"{first}{' *' * row.get('default', False)}", *others])
        heads = [_HEADS.get(column, column) for column in columns]
        show([table(_TITLES.get(what, what), heads, cells), *_MORE.get(what, ())])
    else:
        width = max(_LEAST_WIDTH, get_terminal_size().columns)
        lines = details(chosen, width) if chosen else screen(recipes, width)
        typer.echo("\n".join(lines))


def screen(recipes: Iterable[Listed], width: int) -> list[str]:
    """One line for each model: its name and its variants."""
    table = {"model": ["variants (* what the bare model name means)"]}
    for model, variants in groupby(recipes, key=lambda recipe: recipe.model):
        table[model] = [f"{each.variant}{'*' * each.is_default}" for each in variants]
    indent = max(map(len, table)) + 2
    lines = []
    for model, names in table.items():
        lines += _wrapped("  ".join(names), width, first=f"{model:<{indent}}", then=" " * indent)
    more = "One of them: keepmtp ls MODEL. More: keepmtp ls models, schemes or families."
    return [*lines, "", *_wrapped(more, width)]


def details(variants: Sequence[Listed], width: int) -> list[str]:
    """One model: its family and source, and for each variant what it does and the command that runs
    it.
    """
    model = variants[0]
    needs_batches = False
    lines = [model.model, f"  family  {model.family}", f"  source  {model.source}"]
    for each in variants:
        needs_batches |= each.needs_batches
        batches = f"{'no ' * (not each.needs_batches)}batches needed"
        lines += ["", f"{each.variant}{' (default)' * each.is_default}: {batches}"]
        lines += _wrapped(each.summary, width, "  ", "  ")
        lines.append(f"  keepmtp quantize {each.model if each.is_default else each.name}")
    if needs_batches:
        lines += [
            "",
            *_wrapped(
                "Batches are text that the model runs on first, to calibrate it. That needs", width
            ),
        ]
        lines.append(f"  {install_command('calibrate')}")
    return lines


def rows(listing: str, recipes: Iterable[Listed]) -> list[Json]:
    """A listing for machines: the columns of its table, and more."""
    if listing == "schemes":
        return _schemes()
    if listing == "families":
        return _families()
    found = []
    for each in recipes:
        found.append(
            {
                "recipe": each.name,
                "model": each.model,
                "variant": each.variant,
                "default": each.is_default,
                "family": each.family,
                "source": each.source,
                "batches": _BATCHES[each.needs_batches],
                "what": each.summary,
            }
        )
    return found


def _schemes() -> list[Json]:
    from ..recipes.schemes import SCHEMES, SEARCHES, num_bytes

    found = []
    for scheme in SCHEMES.values():
        # Bits on disk for each weight, scales included, of a 4096 x 4096 matrix.
        bits = (
            8
            * sum(num_bytes(spec.dtype, spec.shape) for spec in scheme.tensors(4096, 4096))
            / 4096**2
        )
        row = {
            "scheme": scheme.name,
            "bits": f"{bits:.2f}",
            "batches": _BATCHES[scheme.needs_calibration],
            "what": f"{scheme.summary}. Runs on {scheme.hardware}.",
            "searches": [word for word, schemes in SEARCHES.items() if scheme.name in schemes],
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
        found[family.model_type, family.architectures] = {
            "family": names,
            "plan": "yes",
            "check": "yes",
            "backbone": _CAN[not support.backbone],
            "mtp": _CAN[not support.mtp],
            "proof": "-" if support.mtp else support.proof,
            "why_not_backbone": support.backbone,
            "why_not_mtp": support.mtp,
            "what": family.notes,
        }
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
