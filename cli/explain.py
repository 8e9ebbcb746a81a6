"""`keepmtp explain`: what vLLM does with each module group of a checkpoint, and what a serve log
says.

In: a checkpoint, a log, or both. Out: a table for the backbone and the MTP block, the reasons, and
the known failure; exit status 1 if nothing in the log is known.
"""

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType
from rich.text import Text

from ..recipes.errors import RecipeError, printable
from ..validate.report.numbers import counted
from . import exits
from .options import JsonOption, chosen_gpus
from .tables import answer, by_reason, table

if TYPE_CHECKING:
    from ..validate.dryload.explain import Explanation, Log, Recognized

_MOST_CONFIRMED = 3
_MODELS = {"backbone": "target", "mtp": "draft"}  # of vLLM


def explain(
    path: Annotated[str | None, typer.Argument()] = None,
    log: str | None = None,
    gpu: str | None = None,
    as_json: JsonOption = False,
) -> None:
    """Tell in plain words what vLLM does with a checkpoint's modules; and what a serve log says of
    a failure.

    For each group of modules: what vLLM builds it as, what it is filled from, and which entry of
    the quantization config decides it. Headers are enough. With --gpu, vLLM's own classes load it,
    and name the kernels too.

    With --log, the last 8 MiB are compared with the failures that people report of such
    checkpoints. Each comes with its threads, the versions of vLLM concerned, the tensor or entry of
    this checkpoint, and the command that cures it.

    Exit status 0 if all is explained, 1 if the log has no failure that is known or nothing can be
    said of the modules, 2 if there is nothing to read.

    Example: `keepmtp explain nvidia/Qwen3.5-397B-A17B-NVFP4 --gpu sm100`

    Example: `vllm serve out/tiny-glm4-moe.w4a16-fp8 2>&1 | keepmtp explain
    out/tiny-glm4-moe.w4a16-fp8 --log -`

    Args:
        path: The checkpoint: a folder or a Hub id; or none, with --log.
        log: A serve log or a traceback: a file, or - for standard input.
        gpu: Also name the kernels, on a pretended GPU from sm80 to sm120.
    """
    from .. import api
    from ..validate.dryload.explain import explain as explanation_of

    rule = cure = ""
    if path is None and log is None:
        rule = "needs a checkpoint, a log, or both"
        cure = "Name a folder, or --log"
    elif path is None and gpu is not None:
        rule = "--gpu loads a checkpoint"
        cure = "Name its folder or Hub id"
    if rule:
        raise RecipeError("explain", rule, got="no checkpoint", cure=cure)
    checked = None
    if path is not None:
        gpus = chosen_gpus([gpu] if gpu else [])
        (checked,) = api.check_all([path], gpus=gpus)
        checked.readable()
    # A log comes from a pipe as well, and its last part counts: it is read to its end before
    # anything is said.
    read = None
    if log is not None:
        read = _log(log)
    explained = explanation_of(checked, read)
    status = 0
    if not explained.is_explained:
        status = exits.FINDINGS
    answer(explained, _parts(explained), as_json=as_json, status=status)


def _log(where: str) -> "Log":
    from ..validate.dryload.explain import MOST_BYTES, read_log

    if where == "-":
        with open(sys.stdin.fileno(), "rb", closefd=False) as stream:
            return read_log(stream)
    # A FIFO that nobody writes into would be waited for, and a device never ends.
    if not Path(where).is_file():
        raise RecipeError(
            "--log",
            "must be a file, or - for standard input",
            got=where,
            cure="Name the file that the server wrote, or pipe it",
        )
    with Path(where).open("rb") as stream:
        stream.seek(max(0, Path(where).stat().st_size - MOST_BYTES - 1))
        return read_log(stream)


def _parts(found: "Explanation") -> Iterator[RenderableType]:
    """The groups of both models, why they are so, and what the log says."""
    from ..validate.facts.findings import errors_of
    from .findings import with_path

    if found.path:
        family = f"{found.family}, {found.dialect}"
        if not found.family:
            family = "what vLLM builds of it cannot be told"
        yield f"{found.path}: {family}"
    rows = []
    named = []
    for group in found.groups:
        modules = f"{_MODELS[group.part]} {group.modules}"
        filled = f"{group.tensors:,} tensors, {group.stored}"
        rows.append([f"{modules} ({group.count:,})", group.built, filled])
        named.append((group.why, modules))
    if rows:
        yield table("", ("modules", "built as", "filled from"), rows)
    for reason, modules in by_reason(named).items():
        yield f"Why {modules}: {reason}."
    if errors := errors_of(found.findings):
        first = errors[0]
        cure = with_path(first.cure, found.path).rstrip(".")
        count = counted(len(errors), "error")
        yield f"The check finds {count}; the first: {first.where}: {first.says}. Cure: {cure}."
    elif found.path:
        yield "The check finds no error in it."
    for known in found.answers:
        yield Text.assemble(("\nknown: ", "bold green"), printable(known.failure.name))
        for row in _known(found, known):
            yield f"  {row}"
        if known.command:
            yield Text(f"  keepmtp {printable(shlex.join(known.command))}", style="bold")
    for line in found.unknown:
        yield Text.assemble(("\nunknown: ", "bold red"), printable(line))
    if found.log_lines is not None and not found.answers:
        yield "The log has no failure that keepmtp knows."
        if not found.path:
            yield "`keepmtp check PATH --gpu sm100` lets vLLM's own loaders judge a checkpoint."


def _known(found: "Explanation", answer: "Recognized") -> Iterator[str]:
    """What a line of the log is, and what of it is so in this checkpoint."""
    known = answer.failure
    yield f"The log says: {answer.line}"
    if answer.names:
        yield f"It names {answer.names}, here {answer.on_disk or 'not known'}."
    often = "is"
    if known.is_general:
        often = "often is"
    yield f"What it {often}: {known.says}."
    for finding in answer.confirmed[:_MOST_CONFIRMED]:
        yield f"In this checkpoint: {finding}."
    # A sentence of vLLM's with several causes: the check looked for the known ones.
    if known.is_general and found.path and not answer.confirmed:
        yield "In this checkpoint: nothing of this kind, so it may be a defect of that vLLM."
    versions = known.concerns or f"vLLM {known.versions}"
    yield f"Versions: {versions}. Sources: {known.sources}."
    yield f"Cure: {known.cure}."
