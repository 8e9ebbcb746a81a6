"""What typer says of a command line that it cannot read, as a refusal in keepmtp's form.

In: typer's error and the words that were typed. Out: a refusal, with the nearest name that there is.
"""

import os
import re
import shlex
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

import typer
from typer._click.exceptions import BadOptionUsage, MissingParameter, NoSuchOption, UsageError

from ..recipes.errors import KeepMTPError, did_you_mean


def refusal_of_usage(error: UsageError, words: Sequence[str], *, is_for_vllm: bool) -> KeepMTPError:
    """The refusal that an error of typer means.

    Args:
        error: with its context.
        words: of the command line, after `keepmtp`.
        is_for_vllm: the verb hands words after `--` to `vllm serve`.
    """
    if isinstance(error, BadOptionUsage):
        rule, got = ("needs a value", "none") if "requires" in error.message else ("takes no value", "one")
        return KeepMTPError(error.option_name, rule, got=got, cure=f"See `keepmtp {words[0]} --help`")
    context: Any = error.ctx
    where, says = context.command_path, error.message
    otherwise = f"See `{where} --help`"
    if isinstance(error, NoSuchOption):
        name = error.option_name
        known = [each for param in context.command.params for each in param.opts if each.startswith("-")]
        if is_for_vllm and not get_close_matches(name, known):
            otherwise = f"Words for `vllm serve` stand last, after `--`: `keepmtp {_with_last(name, words)}`"
        return KeepMTPError(where, "has no such option", got=name, cure=did_you_mean(name, known, otherwise=otherwise))
    if isinstance(error, typer.BadParameter) and error.param is not None:
        where = "/".join(error.param.opts)
        if isinstance(error, MissingParameter):
            return KeepMTPError(context.command_path, f"needs {where}", got="none", cure=otherwise)
        fault: Any = error.__cause__
        got = fault.errors()[0]["input"]
        names = re.findall("'([^']+)'", says.partition(" is not one of ")[2])
        rule = f"must be one of {', '.join(names)}" if names else says.partition(",")[0].replace("Input should", "must")
        return KeepMTPError(
            where, rule, got=got, cure=did_you_mean(str(got), names, otherwise="Name one" if names else otherwise)
        )
    if unknown := re.match("No such command '(.*?)'", says):
        cure = did_you_mean(unknown[1], context.command.commands, otherwise=otherwise)
        return KeepMTPError(where, "has no such command", got=unknown[1], cure=cure)
    rule, _, got = says.rstrip(".)").replace("Got unexpected extra argument(s)", "takes no more words").partition(" (")
    return KeepMTPError(where, rule, got=got or "none", cure=otherwise)


def _with_last(option: str, words: Sequence[str]) -> str:
    """The words, with those of an option that is `vllm serve`'s after `--`."""
    at = next(number for number, word in enumerate(words) if word.partition("=")[0] == option)
    has_value = "=" not in words[at] and at + 1 < len(words) and not words[at + 1].startswith("-")
    end = at + 1 + (has_value and not os.path.exists(words[at + 1]))
    return shlex.join([*words[:at], *words[end:], *([] if "--" in words else ["--"]), *words[at:end]])
