"""Asks a person before something that cannot be taken back. Without a terminal there is nobody to ask."""

import sys

import typer

from ..recipes.errors import RecipeError, printable


def refuse_nobody(where: str, rule: str, what: str) -> None:
    """Refuse where no person can be asked.

    Args:
        where: the option or verb.
        rule: what must be confirmed.
        what: will be so.

    Raises:
        RecipeError: standard input is no terminal.
    """
    if not sys.stdin.isatty():
        raise RecipeError(where, rule, got=f"no terminal to ask on, and {what}", cure="Add --yes")


def confirm(where: str, rule: str, what: str) -> None:
    """Ask whether to go on; arguments as for `refuse_nobody`.

    Raises:
        RecipeError: nobody to ask, or the answer is no.
    """
    refuse_nobody(where, rule, what)
    if not typer.confirm(f"{printable(what)}. Go on?", err=True):
        raise RecipeError(where, rule, got="no", cure="Nothing was sent")
