"""The `keepmtp` command: one call a verb, tables for people, `--json` for machines.

In: a command line. Out: the answer on standard output, progress and refusals on standard error, and
an exit status.

Easy to get wrong: programs read standard output, so everything that is not the answer goes to
standard error. And help must be there at once: a verb's file is imported only when somebody asks
for that verb, and it imports what is slow (pydantic, the Hub's client, the other floors) inside the
functions that use it.

`exits.py` has the exit statuses, and what is said when a command ends early.
"""

import gc
import logging
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from functools import wraps
from importlib import import_module
from inspect import Parameter, Signature, signature
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from .. import __version__
from ..recipes.errors import KeepMTPError, RecipeError, did_you_mean
from . import exits

# `keepmtp --help`, in the order of work. A verb is the function of its name in the file of its
# name.
_GROUPS: Mapping[str, Mapping[str, str]] = {
    "Make": {
        "ls": "List models that have recipes, schemes, or families.",
        "init": "Write a recipe to edit.",
        "plan": "Show what would become of every tensor.",
        "quantize": "Quantize a checkpoint, and keep its MTP block.",
    },
    "Judge": {
        "check": "Will vLLM load it, and the draft work?",
        "compare": "Show checkpoints of a model next to each other.",
        "doctor": "Print what is installed, and what is missing.",
    },
    "Mend": {
        "fix": "Cure what check finds, with the release's MTP block.",
    },
    "Measure": {
        "serve": "Serve a checkpoint with vLLM and MTP.",
        "eval": "Compare with the source, and judge by the gates.",
        "bench": "Measure how fast vLLM serves, for each k.",
    },
    "Ship": {
        "card": "Write the model card, its page and plot.",
        "publish": "Upload a checkpoint and its card, and check.",
    },
}
VERBS: Mapping[str, str] = {
    name: does for group in _GROUPS.values() for name, does in group.items()
}
# What an older release had, a verb or `VERB --option`, and what does it now: for one release.
WENT: Mapping[str, str] = {
    "explain": "Use keepmtp check PATH --modules",
    "all": "Use make all",
    "convert": "Use keepmtp quantize PATH --set format=modelopt",
    "graft": "Use keepmtp fix PATH --from RELEASE --out NEW",
    "extra": "Run keepmtp quantize, which names what is missing",
    "where": "Name the folder: keepmtp quantize MODEL --out FOLDER",
    "report": "Use keepmtp card PATH",
    "serve-check": "Use keepmtp eval PATH --only acceptance,lossless",
    "closeness": "Use keepmtp eval PATH --only closeness",
    "gate": "Use keepmtp eval PATH --only gates",
    "check --static-only": "Leave --gpu out",
    "check --html": "Use keepmtp check PATH --json, or card",
    "compare --out": "Use keepmtp compare --json",
    "compare --source": "Use keepmtp check PATH --values all --source RELEASE",
    **dict.fromkeys(
        ["fix --gpu", "fix --static-only", "compare --gpu", "compare --tp", "compare --vllm"],
        "Leave it out: keepmtp check PATH --gpu GPU lets vLLM load it",
    ),
    "eval --run-model-code": "Run humaneval by lm-eval itself, against keepmtp serve",
    "eval --no-plain": "Leave lossless out of --only",
    "eval --depth": "Use keepmtp eval PATH --only tasks,lossless --dataset FILE, of long texts",
    **dict.fromkeys(
        [f"eval --{name}" for name in ("shots", "api", "concurrency", "seed", "prefix-caching")],
        "Write it into the recipe's evaluation block",
    ),
    "serve --gpu": "Run keepmtp check PATH --gpu GPU first",
    "serve --every": "Read vLLM's own log",
    "serve --log": "Add 2>&1 | tee FILE to the command",
}
# What the same command does once more, where one was stopped by Ctrl-C or a signal.
_GOES_ON = ("quantize", "fix", "eval", "bench", "publish")
# What typer adds has no default, and to see that None is no bool, typer 0.29 imports pydantic.
_STARTS = {"default_map": {"help": False, "install_completion": False, "show_completion": False}}
_OPTION = re.compile(r"(--[\w-]+=)?(.*)", re.DOTALL)


class _Verb(TyperCommand):
    """One verb."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the words, with `~` expanded, and the value of --values filled in."""
        for at, word in enumerate(args):
            # A shell expands `~` in `~/x`, but not in `--out=~/x` or in quotes.
            option, path = _OPTION.findall(word)[0]
            args[at] = option + os.path.expanduser(path)
        if "--values" in args:
            at = args.index("--values") + 1
            follows = "".join(args[at : at + 1])
            # A word that is no place is a value, or a typo of one.
            if not follows or follows[0] == "-" or "/" in follows or os.path.exists(follows):
                args.insert(at, "scales")
        return super().parse_args(ctx, args)


class _Verbs(TyperGroup):
    """All verbs. A verb's file is imported to run it or to show its help, and for nothing else."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Their names."""
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The verb of this name with its options; None if there is none."""
        if cmd_name not in VERBS:
            return None
        file = cmd_name.replace("-", "_")
        verb = getattr(import_module(f".{file}", __package__), file)
        alone = typer.Typer(add_completion=False, rich_markup_mode=None)
        usage = "[OPTIONS]"
        # It reads its word itself: for an argument, typer imports pydantic.
        if cmd_name == "ls":
            usage += " [WHAT]"
        settings = _STARTS | {"allow_extra_args": cmd_name == "ls"}
        alone.command(cmd_name, cls=_Verb, options_metavar=usage, context_settings=settings)(
            spread(verb)
        )
        return typer.main.get_command(alone)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """The verbs by group."""
        for title, group in _GROUPS.items():
            with formatter.section(title):
                formatter.write_dl(list(group.items()))


def spread(verb: Callable[..., None]) -> Callable[..., None]:
    """A verb as typer reads it: where it has a parameter for a group of options, all of them."""
    groups = dict[str, Any]()
    options = list[Parameter]()
    for parameter in signature(verb).parameters.values():
        group = parameter.annotation
        if is_dataclass(group) and isinstance(group, type):
            groups[parameter.name] = group
            options += signature(group).parameters.values()
        else:
            options.append(parameter)

    @wraps(verb)
    def call(**words: Any) -> None:
        for name, group in groups.items():
            own = {option: words.pop(option) for option in signature(group).parameters}
            words[name] = group(**own)
        verb(**words)

    by_name = [option.replace(kind=Parameter.KEYWORD_ONLY) for option in options]
    vars(call)["__signature__"] = Signature(by_name)
    return call


def _refusal(error: Any, words: list[str]) -> KeepMTPError:
    """What typer says of a command line, in our form."""
    verb, *others = words
    options = [f"{verb} {word.partition('=')[0]}" for word in others]
    for old in (verb, *options):
        if old in WENT:
            return RecipeError(f"keepmtp {old}", "went", got="an older name", cure=WENT[old])
    where = "keepmtp"
    known = [*VERBS]
    cure = ""
    if error.ctx is not None:
        where = error.ctx.command_path
        for param in error.ctx.command.params:
            known += [name for name in param.opts if name[0] == "-"]
            if param.name == "vllm_words":
                cure = "Words for `vllm serve` stand last, after `--`"
    quoted = re.findall("'([^']+)'", error.message)
    typed = "".join(quoted[:1])
    otherwise = f"See `{where} --help`"
    if hasattr(error, "possibilities"):  # no such option
        typed = error.option_name
        otherwise = cure or otherwise
    if typed not in known:  # else it is no slip, but lacks a value or has one too many
        otherwise = did_you_mean(typed, [*quoted[1:], *known], otherwise=otherwise)
    rule = re.split(r"\. Choose from| \(Possible", error.format_message())[0].rstrip(".")
    return KeepMTPError(where, rule, got=shlex.join(words), cure=otherwise)


app = typer.Typer(
    cls=_Verbs,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings=_STARTS | {"help_option_names": ["--help", "-h"]},
    help="Quantize large models for vLLM and keep their multi-token-prediction (MTP) block usable.",
)


def _version(value: bool) -> None:
    if value:
        sys.stdout.write(f"keepmtp {__version__}\n")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool,
        typer.Option(
            "--version", "-V", callback=_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    # llm-compressor logs to standard output, also while it is imported. A user's
    # LLM_COMPRESSOR_LOG_DISABLED ends a run: with it, the package does not define its level METRIC,
    # and GPTQ logs at that level (0.14.0.1 logger.py).
    os.environ.pop("LLM_COMPRESSOR_LOG_DISABLED", None)
    os.environ.setdefault("LLM_COMPRESSOR_LOG_LEVEL", "CRITICAL")
    # The Hub's client tells of its retries; the refusal at the end says why. Its bars would mix
    # with ours.
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    # It has its own handler, and every line would appear twice.
    logging.getLogger("huggingface_hub").propagate = False


def command() -> None:
    """Run the command line, and end with its status.

    Raises:
        KeepMTPError: a refusal, of words that typer cannot read too.
    """
    words = sys.argv[1:]
    try:
        # Without a word, typer prints the help on standard error.
        status = typer.main.get_command(app)(prog_name="keepmtp", standalone_mode=not words)
    except typer.Abort:  # Ctrl-C at a question
        status = 130
    except typer.TyperException as error:
        raise _refusal(error, words) from error
    gc.freeze()  # Python would look at every imported object once more: up to 3 s
    sys.exit(status)


def main() -> None:
    """Entry point; see `exits.py` for how it ends."""
    how_to_go_on = exits.STARTS_AGAIN
    if sys.argv[1:] and sys.argv[1] in _GOES_ON:
        how_to_go_on = exits.GOES_ON
    exits.run(command, how_to_go_on=how_to_go_on)
