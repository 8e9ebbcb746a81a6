"""The `keepmtp` command: one call a verb, tables for people, `--json` for machines.

In: a command line. Out: the answer on standard output, progress and refusals on standard error, and
an exit status.

Easy to get wrong: programs read standard output, so everything that is not the answer goes to
standard error. And help must be there at once: a verb's file is imported only when somebody asks
for that verb, and it imports what is slow (pydantic, the Hub's client, the other floors) inside the
functions that use it.

`exits.py` has the exit statuses, and what is said when a command ends early.
"""

import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, fields, is_dataclass
from difflib import get_close_matches
from importlib import import_module
from inspect import Parameter, Signature, getdoc, signature
from types import MappingProxyType
from typing import Annotated, Any, get_origin

import typer
from typer._click.core import Command
from typer._click.exceptions import NoArgsIsHelpError, UsageError
from typer.core import TyperCommand, TyperGroup

from .. import __version__
from . import exits


@dataclass(frozen=True)
class Verb:
    """Where a verb is, and what `keepmtp --help` says of it.

    Attributes:
        place: the file in this folder, and the function in it.
        help: the first line of the function's docstring.
        words: how the usage names the words that the function parses itself.
        how_to_go_on: a sentence without its full stop, for a command that is stopped by Ctrl-C or a
            signal.
        lone: an option whose value may be left out, and its values; the first one is then meant.
    """

    place: str
    help: str
    words: str = ""
    how_to_go_on: str = "The same command starts again"
    lone: tuple[str, tuple[str, ...]] = ("", ())

    def load(self) -> Callable[..., None]:
        """The function."""
        module, function = self.place.split(".")
        return getattr(import_module(f".{module}", __package__), function)


_FOR_VLLM = "[-- VLLM_OPTIONS]"

# The groups of `keepmtp --help`, in the order of work; the last one is for the make targets and not
# shown.
_GROUPS: Mapping[str, Mapping[str, Verb]] = {
    "Make": {
        "ls": Verb(
            "ls.ls",
            "List the models that have recipes, with their variants; or one model, the schemes, "
            "the families.",
            words="[WHAT]",
        ),
        "init": Verb(
            "quantize.init",
            "Write a recipe to edit: for a folder or Hub id of a known family, or a copy of a "
            "model's own.",
        ),
        "plan": Verb(
            "plan.plan",
            "Show what would become of every tensor, from headers alone: no weight is read, "
            "nothing is written.",
        ),
        "quantize": Verb(
            "quantize.quantize",
            "Quantize a checkpoint and keep its MTP block, as the model's recipe says.",
            how_to_go_on="The same command goes on where this one stopped",
        ),
        "all": Verb(
            "all.everything",
            "Quantize, check, serve, evaluate and write the card, in one go; stops at the first "
            "red gate.",
            words=_FOR_VLLM,
            how_to_go_on="The same command goes on: what was finished is not done again",
        ),
    },
    "Judge": {
        "check": Verb(
            "check.check",
            "Judge checkpoints from config.json and headers: will vLLM load them, and will the MTP "
            "draft be real?",
            lone=("--values", ("scales", "scalars", "all")),
        ),
        "explain": Verb(
            "explain.explain",
            "Tell in plain words what vLLM does with a checkpoint's modules; and what a serve log "
            "says of a failure.",
        ),
        "gate": Verb(
            "report.gate",
            "Judge a checkpoint by its recipe's gates, from what was measured.",
        ),
        "doctor": Verb(
            "doctor.doctor",
            "Say what was found on this machine, what can be checked here, and what would enable "
            "the rest.",
        ),
    },
    "Mend": {
        "fix": Verb(
            "mend.fix",
            "Cure what `keepmtp check` finds and what needs no new values: a diff, and with --out "
            "a new folder.",
        ),
        "graft": Verb(
            "mend.graft",
            "Put the MTP block of the release into a quantized checkpoint that lost it, or whose "
            "block is broken.",
            how_to_go_on="The same command goes on: what was fetched and packed is not done again",
        ),
        "convert": Verb(
            "mend.convert",
            "Convert a finished checkpoint between compressed-tensors' dialect and modelopt's.",
        ),
    },
    "Measure": {
        "serve": Verb(
            "serve.serve",
            "Serve a checkpoint with vLLM and MTP: checked before, and with its acceptance watched "
            "until it is stopped.",
            words=_FOR_VLLM,
        ),
        "serve-check": Verb(
            "compare.serve_check",
            "Serve a checkpoint and its source with vLLM, with and without MTP, and compare what "
            "is accepted.",
            words=_FOR_VLLM,
        ),
        "eval": Verb(
            "eval.evaluate",
            "Score a checkpoint and its source on the recipe's tasks, served by vLLM with "
            "method=mtp, under one protocol each.",
            words=_FOR_VLLM,
            how_to_go_on="The same command asks only the questions that have no answer yet",
        ),
        "bench": Verb(
            "bench.bench",
            "Measure how fast vLLM serves a checkpoint with and without MTP, for each k and load; "
            "recommend a k.",
            words=_FOR_VLLM,
            how_to_go_on="The same command measures only what is missing",
        ),
        "closeness": Verb(
            "compare.closeness",
            "Compare what a served checkpoint and its served source predict on held-out text: "
            "divergence and flips.",
            words=_FOR_VLLM,
            how_to_go_on="The same command asks only the windows that are missing",
        ),
    },
    "Ship": {
        "report": Verb(
            "report.page",
            "Make the HTML page of a report.json again: one file without scripts or requests, to "
            "send or to print.",
        ),
        "card": Verb(
            "report.card",
            "Write a checkpoint's model card: README.md, plots, the whole report, ready for "
            "`keepmtp publish`.",
        ),
        "publish": Verb(
            "publish.publish",
            "Upload a checkpoint and its card to the Hub, private by default, and check what "
            "arrived.",
            how_to_go_on="The same command goes on: what was sent is not sent again",
        ),
    },
    "": {
        "extra": Verb(
            "quantize.extra",
            "Print which of keepmtp's extras `keepmtp quantize` needs for a recipe: quantize, "
            "calibrate or modelopt.",
        ),
        "where": Verb(
            "quantize.where",
            "Print the folder that `keepmtp quantize` with the same words has written; the make "
            "targets ask this.",
        ),
    },
}
VERBS: Mapping[str, Verb] = MappingProxyType(
    {name: verb for group in _GROUPS.values() for name, verb in group.items()}
)


# The section of a docstring that explains parameters, and one of them in it.
_OF_PARAMETERS = re.compile(r"\n\n(?:Args|Attributes):\n")
_PARAMETER = re.compile(r"^    (\w+): (.*(?:\n {8,}.*)*)", re.MULTILINE)
_EXAMPLE = re.compile(r"\n\n(Example: .*)(?:\n(\S.*))?")


class _Starting(Command):
    """Starts at once: without a default an option is None, and to see that None is no bool, typer
    0.29 imports pydantic.
    """

    def get_params(self, ctx: Any) -> Any:
        """The options; those that typer adds, such as --help, are False."""
        options = super().get_params(ctx)
        for option in options:
            if not option.expose_value:
                option.default = False
        return options


class _Command(_Starting, TyperCommand):
    """One verb."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the words, with `~` expanded. A shell does that in `~/x`, but not in `--out=~/x` or
        in quotes.
        """
        ours = [*args, "--"].index("--")
        words = []
        for word in args[:ours]:
            option, path = re.findall(r"^(--[^=]*=(?=~))?(.*)", word, re.DOTALL)[0]
            words.append(option + os.path.expanduser(path))
        option, values = VERBS[str(self.name)].lone
        if option and option in words:
            at = words.index(option) + 1
            follows = "".join(words[at : at + 1])
            # A word that is nearly a value, and no file, is a typo of it.
            is_typo = get_close_matches(follows, values) and not os.path.exists(follows)
            if follows not in values and not is_typo:
                words.insert(at, values[0])
        return super().parse_args(ctx, [*words, *args[ours:]])

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The words after the verb in its usage."""
        return [*super().collect_usage_pieces(ctx), *filter(None, [VERBS[str(self.name)].words])]


class _Verbs(_Starting, TyperGroup):
    """All verbs. The table has names and one-line helps; a verb's file is imported to run it or to
    show its help.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name in VERBS:
            self.add_command(TyperCommand(name))

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """The verbs by group."""
        for title, group in _GROUPS.items():
            if title:
                with formatter.section(title):
                    formatter.write_dl([(name, verb.help) for name, verb in group.items()])

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the words before the verb."""
        with _in_our_form(args):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the verb. Ctrl-C at a question is Ctrl-C."""
        try:
            with _in_our_form([*ctx._protected_args, *ctx.args]):
                return super().invoke(ctx)
        except typer.Abort as aborted:
            raise KeyboardInterrupt from aborted

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The verb that the first word names, with its options, and the words after it."""
        name, _, rest = super().resolve_command(ctx, args)
        return name, name and _load(name), rest


@contextmanager
def _in_our_form(words: list[str]) -> Iterator[None]:
    """What typer says of a command line, as a refusal."""
    try:
        yield
    except NoArgsIsHelpError:
        raise
    except UsageError as error:
        verb = VERBS.get(error.ctx.info_name or "") if error.ctx else None
        is_for_vllm = verb is not None and verb.words == _FOR_VLLM
        raise exits.refusal_of_usage(error, words, is_for_vllm=is_for_vllm) from error


def _load(name: str) -> Any:
    verb = VERBS[name]
    alone = typer.Typer(add_completion=False, rich_markup_mode=None)
    settings = {"allow_extra_args": bool(verb.words)}
    alone.command(name, cls=_Command, context_settings=settings)(flat(verb.load()))
    return typer.main.get_command(alone)


def flat(verb: Callable[..., None]) -> Callable[..., None]:
    """A verb as typer reads it.

    Where it has a parameter for a group of options, all of them stand instead. The help of an
    option is what the docstring of the verb, or of the group, says of it under `Args:` or
    `Attributes:`.
    """
    parameters = list[Parameter]()
    groups = dict[str, Any]()
    for parameter in _explained(verb):
        if is_dataclass(group := parameter.annotation) and isinstance(group, type):
            groups[parameter.name] = group
            parameters += _explained(group)
        else:
            parameters.append(parameter)

    def call(**words: Any) -> None:
        for name, group in groups.items():
            words[name] = group(**{field.name: words.pop(field.name) for field in fields(group)})
        verb(**words)

    # Examples are pasted: typer breaks no line of a paragraph that begins with \b.
    told = _OF_PARAMETERS.split(getdoc(verb) or "")[0]
    call.__doc__ = _EXAMPLE.sub(
        lambda found: f"\n\n\b\n{' '.join(filter(None, found.groups()))}", told
    )
    call.__annotations__ = {each.name: each.annotation for each in parameters}
    setattr(call, "__signature__", Signature(parameters))  # noqa: B010
    return call


def _explained(verb: Callable[..., Any]) -> Iterator[Parameter]:
    """The parameters of a verb or of a group of options, each with its help."""
    _, *sections = _OF_PARAMETERS.split(getdoc(verb) or "")
    helps = dict(_PARAMETER.findall("".join(sections)))
    for name, parameter in signature(verb).parameters.items():
        kind = parameter.annotation
        option = None
        if get_origin(kind) is Annotated:
            kind, option = kind.__origin__, copy(kind.__metadata__[0])
        elif parameter.default is False:
            option = typer.Option(f"--{name.replace('_', '-')}")
        elif name in helps:
            option = typer.Argument() if parameter.default is Parameter.empty else typer.Option()
        if option is not None:
            option.help = " ".join(helps.get(name, option.help or "").split())
            kind = Annotated[kind, option]
        yield parameter.replace(annotation=kind, kind=Parameter.KEYWORD_ONLY)


app = typer.Typer(
    cls=_Verbs,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
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
    # llm-compressor logs to standard output, also while it is imported. LLM_COMPRESSOR_LOG_DISABLED
    # does not work: with it, the package does not define its level METRIC, and GPTQ logs at that
    # level (0.14.0.1 logger.py).
    os.environ.setdefault("LLM_COMPRESSOR_LOG_LEVEL", "CRITICAL")
    os.environ.setdefault(
        "HF_HUB_VERBOSITY", "error"
    )  # its retries; the refusal at the end says why
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # they would mix with ours
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger(
        "huggingface_hub"
    ).propagate = False  # it has its own handler, and every line would appear twice


def main() -> None:
    """Entry point; see `exits.py` for how it ends."""
    verb = next((VERBS[word] for word in sys.argv[1:] if word in VERBS), Verb)
    exits.run(typer.main.get_command(app), how_to_go_on=verb.how_to_go_on)
