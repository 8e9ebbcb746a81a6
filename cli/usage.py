"""What typer says of a command line that it cannot read, as a refusal in keepmtp's form.

In: typer's error and the words that were typed. Out: a refusal, with the nearest name that there
is.
"""

import re
import shlex
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from typer._click.exceptions import BadOptionUsage, BadParameter, NoSuchOption, UsageError

from ..recipes.errors import KeepMTPError, did_you_mean


def refusal_of_usage(error: UsageError, words: Sequence[str], *, is_for_vllm: bool) -> KeepMTPError:
    """The refusal that an error of typer means.

    Args:
        error: with its context.
        words: of the command line, after `keepmtp`.
        is_for_vllm: the verb hands words after `--` to `vllm serve`.
    """
    context: Any = error.ctx
    where = context.command_path if context else f"keepmtp {words[0]}"
    rule, got, cure = error.message.rstrip("."), shlex.join(words), f"See `{where} --help`"
    if isinstance(error, NoSuchOption):
        rule, got = "has no such option", error.option_name
        known = [
            each for param in context.command.params for each in param.opts if each.startswith("-")
        ]
        if is_for_vllm and not get_close_matches(got, known):
            cure = "Words for `vllm serve` stand last, after `--`"
        cure = did_you_mean(got, known, otherwise=cure)
    elif isinstance(error, BadOptionUsage):
        where, rule = error.option_name, "needs a value" if "requires" in rule else "takes no value"
    elif isinstance(error, BadParameter) and error.param is not None:
        option, fault = "/".join(error.param.opts), error.__cause__
        if fault is None:
            rule, got = f"needs {option}", "none"
        else:
            where, got = option, fault.errors()[0]["input"]  # pyright: ignore[reportAttributeAccessIssue]
            names = re.findall("'([^']+)'", rule.partition(" is not one of ")[2])
            rule = rule.partition(",")[0].replace("Input should", "must")
            if names:
                rule, cure = (
                    f"must be one of {', '.join(names)}",
                    did_you_mean(got, names, otherwise="Name one"),
                )
    elif rule.startswith("Got unexpected extra"):
        rule = "takes no more words"
    elif unknown := re.match("No such command '(.*?)'", rule):
        rule, got = "has no such command", unknown[1]
        cure = did_you_mean(got, context.command.commands, otherwise=cure)
    return KeepMTPError(where, rule, got=got, cure=cure)
