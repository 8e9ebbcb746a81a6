"""`keepmtp explain`: what vLLM does with each module group of a checkpoint, and what a serve log says.

In: a checkpoint, a log, or both. Out: a table for the backbone and the MTP block, the reasons, and the known failure;
exit status 1 if nothing in the log is known.

Easy to get wrong: a log comes from a pipe as well, and without an end. Only its last part counts, so it is read to its
end before anything is said.
"""

import shlex
import stat
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from ..recipes.errors import RecipeError, printable
from . import exits, tables
from .findings import with_path, wrapped
from .options import AnyVLLMOption, JsonOption, chosen_gpus, chosen_vllm

if TYPE_CHECKING:
    from ..validate.check.check import Checked
    from ..validate.dryload.explain import Explanation, Recognized
    from ..validate.dryload.log import Log

_MOST_CONFIRMED = 3
_TITLES = {"backbone": "the backbone: vLLM's target", "mtp": "the MTP block: vLLM's draft"}


def explain(
    path: Annotated[
        str | None, typer.Argument(help="The checkpoint: a folder or a Hub id; or none, with --log.")
    ] = None,
    log: Annotated[
        str | None, typer.Option("--log", help="A serve log or a traceback: a file, or - for standard input.")
    ] = None,
    gpu: Annotated[
        str | None, typer.Option("--gpu", help="Also name the kernels, on a pretended sm89, sm90, sm100 or sm120.")
    ] = None,
    any_vllm: AnyVLLMOption = False,
    as_json: JsonOption = False,
) -> None:
    """Tell in plain words what vLLM does with a checkpoint's modules; and what a serve log says of a failure.

    For each group of modules: what vLLM builds it as, what it is filled from, and which entry of the quantization
    config decides it. Headers are enough. With --gpu, vLLM's own classes load it, and name the kernels too.

    With --log, the last 8 MiB are compared with the failures that people report of such checkpoints. Each comes with
    its threads, the versions of vLLM concerned, the tensor or entry of this checkpoint, and the command that cures it.

    Exit status 0 if all is explained, 1 if the log has no failure that is known or nothing can be said of the modules,
    2 if there is nothing to read.

    Example: `keepmtp explain nvidia/Qwen3.5-397B-A17B-NVFP4 --gpu sm100`

    Example: `vllm serve out/tiny-glm4-moe.w4a16-fp8 2>&1 | keepmtp explain out/tiny-glm4-moe.w4a16-fp8 --log -`
    """
    from ..validate.dryload.explain import explain as explanation_of

    if path is None and log is None:
        raise RecipeError(
            "explain", "needs a checkpoint, a log, or both", got="neither", cure="Name a folder, or --log"
        )
    if path is None and gpu is not None:
        raise RecipeError("explain", "--gpu loads a checkpoint", got="no checkpoint", cure="Name its folder or Hub id")
    checked = _checked(path, gpu, any_vllm=any_vllm) if path is not None else None
    found = explanation_of(checked, _log(log) if log is not None else None)
    if as_json:
        tables.print_json(found.model_dump())
    else:
        _show(Console(), found)
    if not found.is_explained:
        raise typer.Exit(exits.FINDINGS)


def _checked(path: str, gpu: str | None, *, any_vllm: bool) -> "Checked":
    from .. import api

    gpus = chosen_gpus([gpu] if gpu else [])
    if gpus:
        chosen_vllm(any_vllm=any_vllm)
    (found,) = api.check_all([path], gpus=gpus, any_vllm=any_vllm)
    found.readable()
    return found


def _log(where: str) -> "Log":
    from ..validate.dryload.log import MOST_BYTES, read_log

    if where == "-":
        return read_log(sys.stdin.buffer)
    status = Path(where).stat()
    if not stat.S_ISREG(status.st_mode):
        cure = "Name the file that the server wrote, or pipe it: `vllm serve ... 2>&1 | keepmtp explain --log -`"
        raise RecipeError("--log", "must be a file, or - for standard input", got=where, cure=cure)
    with Path(where).open("rb") as stream:
        stream.seek(max(0, status.st_size - MOST_BYTES - 1))
        return read_log(stream)


def _show(console: Console, found: "Explanation") -> None:
    if found.path:
        _say(
            console,
            f"{found.path}: "
            + (f"{found.family}, {found.dialect}" if found.family else "what vLLM builds of it cannot be told"),
        )
    for part, title in _TITLES.items():
        if any(group.part == part for group in found.groups):
            console.print(_groups(found, part, title))
    for sentence in (*_reasons(found), *found.notes, *_verdict(found)):
        _say(console, sentence)
    if found.log_version:
        _say(console, f"The log is of vLLM {found.log_version}; what is said of versions was read up to 0.32.")
    for answer in found.answers:
        _answer(console, found, answer)
    if found.log_lines is not None:
        _unknown(console, found)


def _groups(found: "Explanation", part: str, title: str) -> "tables.Table":
    has_kernels = any(group.kernel for group in found.groups)
    table = tables.plain_table(title)
    for column in ("modules", "built as", "filled from", *(("kernel",) if has_kernels else ())):
        table.add_column(column, overflow="fold")
    for group in found.groups:
        if group.part == part:
            files = group.first_file if group.files == 1 else f"{group.files} files"
            cells = [f"{group.modules} ({group.count:,})", group.built, f"{group.tensors:,} {group.stored} in {files}"]
            cells += [group.kernel] if has_kernels else []
            table.add_row(*(tables.escape(cell) for cell in cells))
    return table


def _reasons(found: "Explanation") -> list[str]:
    """Each reason once, after the groups that have it."""
    modules_of: dict[str, list[str]] = defaultdict(list)
    for group in found.groups:
        name = group.modules if group.part == "backbone" else f"MTP {group.modules}"
        if name not in modules_of[group.why]:
            modules_of[group.why].append(name)
    return [f"Why {', '.join(modules)}: {reason}." for reason, modules in modules_of.items()]


def _verdict(found: "Explanation") -> list[str]:
    if not found.path:
        return []
    errors = [finding for finding in found.findings if finding.severity == "error"]
    if not errors:
        return ["The check finds no error in it."]
    first = errors[0]
    cure = with_path(first.cure, found.path).rstrip(".")
    count = "an error" if len(errors) == 1 else f"{len(errors)} errors"
    return [f"The check finds {count}; the first: {first.where}: {first.says}. Cure: {cure}."]


def _answer(console: Console, found: "Explanation", answer: "Recognized") -> None:
    known = answer.failure
    console.print(Text.assemble(("\nknown: ", "bold green"), printable(known.name)), highlight=False, soft_wrap=True)
    named = (
        f"It names {answer.names}" + (f", here {answer.on_disk}." if answer.on_disk else ".") if answer.names else ""
    )
    here = [f"In this checkpoint: {each}." for each in answer.confirmed[:_MOST_CONFIRMED]]
    if (more := len(answer.confirmed) - _MOST_CONFIRMED) > 0:
        here.append(f"In this checkpoint: {more} more findings of this kind; `keepmtp check` has them all.")
    what = "What it often is" if known.is_general else "What it is"
    if known.is_general and found.path and not answer.confirmed:
        here = ["In this checkpoint: the check finds nothing of this kind, so it may be a defect of that vLLM."]
    rows = [f"The log says: {answer.line}", named, f"{what}: {known.says}.", *here]
    rows += [f"Versions: {known.concerns}. Sources: {known.sources}.", f"Cure: {known.cure}."]
    for row in filter(None, rows):
        _say(console, row, "  ")
    if answer.command:
        line = Text(f"  keepmtp {printable(shlex.join(answer.command))}", style="bold")
        console.print(line, soft_wrap=True, highlight=False)


def _unknown(console: Console, found: "Explanation") -> None:
    for line in found.unknown:
        console.print(Text.assemble(("\nunknown: ", "bold red"), printable(line)), highlight=False, soft_wrap=True)
    if not found.answers:
        what = "No line of the log is a failure that keepmtp knows" if found.log_lines else "The log has no failure"
        more = " `keepmtp check PATH --gpu sm100` lets vLLM's own loaders judge a checkpoint." if not found.path else ""
        _say(console, f"{what}: this is unknown.{more}")


def _say(console: Console, sentence: str, indent: str = "") -> None:
    for line in wrapped(console, printable(sentence), indent):
        console.print(Text(line), highlight=False, soft_wrap=True)
