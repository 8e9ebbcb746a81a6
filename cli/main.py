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
from dataclasses import fields, is_dataclass
from importlib import import_module
from inspect import Parameter, Signature, getdoc, signature
from pathlib import Path
from typing import Annotated, Any, get_origin

import typer
from typer._click.core import Command
from typer._click.exceptions import NoArgsIsHelpError, UsageError
from typer.core import TyperCommand, TyperGroup

from .. import __version__
from ..recipes.errors import RecipeError
from . import exits

_FOR_VLLM = "[-- VLLM_OPTIONS]"
# The groups of `keepmtp --help`, in the order of work, with the file in this folder and the
# function of each verb; the last one is for the make targets and not shown.
_GROUPS: Mapping[str, Mapping[str, str]] = {
    "Make": {
        "ls": "ls.ls",
        "init": "init.init",
        "plan": "plan.plan",
        "quantize": "quantize.quantize",
    },
    "Judge": {
        "check": "check.check",
        "compare": "compare.compare",
        "gate": "gate.gate",
        "doctor": "doctor.doctor",
    },
    "Mend": {"fix": "fix.fix", "graft": "graft.graft", "convert": "convert.convert"},
    "Measure": {
        "serve": "serve.serve",
        "serve-check": "serve_check.serve_check",
        "eval": "eval.evaluate",
        "bench": "bench.bench",
        "closeness": "closeness.closeness",
    },
    "Ship": {"card": "card.card", "publish": "publish.publish"},
}
VERBS: Mapping[str, str] = {
    name: place for group in _GROUPS.values() for name, place in group.items()
}
# What an older release had, a verb or `VERB --option`, and what does it now: for one release.
WENT: Mapping[str, str] = {
    "explain": "Use keepmtp check PATH --modules",
    "all": "Use make all, or keepmtp quantize, check, eval and card",
    "extra": "Run keepmtp quantize, which names what is missing",
    "where": "Name the folder: keepmtp quantize MODEL --out FOLDER",
    "report": "Use keepmtp card PATH, which writes its page too",
    "check --html": "Use keepmtp check PATH --json, or --record and then keepmtp card PATH",
    "eval --run-model-code": "Run humaneval by lm-eval itself, against keepmtp serve",
    "serve --every": "Read vLLM's own log, which counts accepted drafts every ten seconds",
    "serve --log": "Redirect what it prints: keepmtp serve PATH 2>&1 | tee FILE",
}
# How the usage names the words that a verb reads itself.
_WORDS = {"ls": "[WHAT]"} | dict.fromkeys(
    ("serve", "serve-check", "eval", "bench", "closeness"), _FOR_VLLM
)
# What the same command does once more, where one was stopped by Ctrl-C or a signal.
_GOES_ON = ("quantize", "graft", "eval", "bench", "closeness", "publish")
_VALUES = "--values"  # its value may be left out


def load(name: str) -> Callable[..., None]:
    """The function of a verb."""
    module, function = VERBS[name].split(".")
    return getattr(import_module(f".{module}", __package__), function)


def summary(name: str) -> str:
    """The first sentence of a verb's docstring.

    It is read as text: to import the files of all verbs would take longer than all else that
    `keepmtp --help` does.
    """
    module, function = VERBS[name].split(".")
    text = Path(__file__).with_name(f"{module}.py").read_text("utf-8")
    _, _, body = text.partition(f"\ndef {function}(")
    docstring = body.split('"""')[1]
    return " ".join(docstring.partition("\n\n")[0].split())


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
        """Read the words, with `~` expanded, and the value of --values filled in."""
        ours = len(args)
        if "--" in args:
            ours = args.index("--")
        for at, word in enumerate(args[:ours]):
            # A shell expands `~` in `~/x`, but not in `--out=~/x` or in quotes.
            option, equals, path = word.partition("=")
            if option.startswith("--") and path.startswith("~"):
                args[at] = option + equals + os.path.expanduser(path)
            else:
                args[at] = os.path.expanduser(word)
        if _VALUES in args:
            at = args.index(_VALUES) + 1
            follows = "".join(args[at : at + 1])
            # A word that is no place is a value, or a typo of one.
            if not follows or follows[0] == "-" or "/" in follows or os.path.exists(follows):
                args.insert(at, "scales")
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The words after the verb in its usage."""
        pieces = super().collect_usage_pieces(ctx)
        if self.name in _WORDS:
            pieces.append(_WORDS[self.name])
        return pieces


class _Verbs(_Starting, TyperGroup):
    """All verbs. A verb's file is imported to run it or to show its help, and for nothing else."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Their names."""
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The verb of this name with its options; None if there is none."""
        if cmd_name in VERBS:
            return _load(cmd_name)
        return None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """The verbs by group."""
        for title, group in _GROUPS.items():
            if title:
                with formatter.section(title):
                    formatter.write_dl([(name, summary(name)) for name in group])

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the words before the verb."""
        _refuse_what_went(args)
        with _in_our_form(args):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the verb. Ctrl-C at a question is Ctrl-C."""
        try:
            with _in_our_form([*ctx._protected_args, *ctx.args]):
                return super().invoke(ctx)
        except typer.Abort as aborted:
            raise KeyboardInterrupt from aborted


def _refuse_what_went(words: list[str]) -> None:
    """Refuse a verb or an option that an older release had.

    Raises:
        RecipeError: says what does it now.
    """
    verb, *others = words or [""]
    options = [f"{verb} {word.partition('=')[0]}" for word in others]
    for old in (verb, *options):
        if old in WENT:
            raise RecipeError(f"keepmtp {old}", "went", got="an older name", cure=WENT[old])


@contextmanager
def _in_our_form(words: list[str]) -> Iterator[None]:
    """What typer says of a command line, as a refusal."""
    try:
        yield
    except NoArgsIsHelpError:
        raise
    except UsageError as error:
        cure = ""
        if error.ctx is not None and _WORDS.get(str(error.ctx.info_name)) == _FOR_VLLM:
            cure = "Words for `vllm serve` stand last, after `--`"
        raise exits.refusal_of_usage(error, words, VERBS, cure=cure) from error


def _load(name: str) -> Any:
    alone = typer.Typer(add_completion=False, rich_markup_mode=None)
    settings = {"allow_extra_args": name in _WORDS}
    alone.command(name, cls=_Command, context_settings=settings)(flat(load(name)))
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
        group = parameter.annotation
        if is_dataclass(group) and isinstance(group, type):
            groups[parameter.name] = group
            parameters += _explained(group)
        else:
            parameters.append(parameter)

    def call(**words: Any) -> None:
        for name, group in groups.items():
            own = {field.name: words.pop(field.name) for field in fields(group)}
            words[name] = group(**own)
        verb(**words)

    text = _OF_PARAMETERS.split(getdoc(verb) or "")[0]
    call.__doc__ = _EXAMPLE.sub(_on_one_line, text)
    # typer reads both, and the signature alone has the order.
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    setattr(call, "__signature__", Signature(parameters))  # noqa: B010
    return call


def _on_one_line(example: re.Match[str]) -> str:
    """An example as it is pasted: typer breaks no line of a paragraph that begins with \\b."""
    first, second = example.groups(default="")
    return f"\n\n\b\n{first} {second}".rstrip()


def _explained(verb: Callable[..., Any]) -> Iterator[Parameter]:
    """The parameters of a verb or of a group of options, each with its help."""
    from . import options

    _, *shared = _OF_PARAMETERS.split(getdoc(options) or "")
    _, *own = _OF_PARAMETERS.split(getdoc(verb) or "")
    helps = dict(_PARAMETER.findall("\n".join([*shared, *own])))
    for name, parameter in signature(verb).parameters.items():
        kind = parameter.annotation
        option = None
        if get_origin(kind) is Annotated:
            # A copy: several verbs share the option, and each may explain it otherwise.
            option = copy(kind.__metadata__[0])
            kind = kind.__origin__
        elif parameter.default is False:
            # Named, so that typer does not add its opposite, `--no-...`.
            option = typer.Option(f"--{name.replace('_', '-')}")
        elif name in helps and parameter.default is Parameter.empty:
            option = typer.Argument()
        elif name in helps:
            option = typer.Option()
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


def main() -> None:
    """Entry point; see `exits.py` for how it ends."""
    does = "starts again"
    if sys.argv[1:] and sys.argv[1] in _GOES_ON:
        does = "goes on where this one stopped"
    exits.run(typer.main.get_command(app), how_to_go_on=f"The same command {does}")
