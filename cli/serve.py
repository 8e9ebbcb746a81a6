"""`keepmtp serve`: the card's serve line, run: checked before, on a port, with its acceptance
watched until it stops.

In: a checkpoint, and words for `vllm serve` after `--`. Out: a server, a line of acceptance now and
then on standard error with the server's own log, and at the end its counters on standard output.
The exit status is the server's, and not 0 if nobody stopped it.
"""

import shlex
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..recipes.errors import GateError, RecipeError, VLLMError
from ..recipes.frozen import frozen
from . import exits
from .findings import with_path
from .options import GpusOption, JsonOption, chosen_gpus, chosen_vllm, refuse_stray_words
from .progress import downloaded, spinner
from .tables import answer, tell

if TYPE_CHECKING:
    from ..checkpoints.source import Source
    from ..validate.check.check import Checked
    from ..validate.facts.vllm_env import VLLM
    from ..validate.measure.foreground import Address, ServerLife
    from ..validate.report.best_k import BestK

_MOST_K = 16
# On a CPU the gated delta net cannot combine prefix caching with drafting (vLLM 0.32).
_CPU_WORDS = ("--dtype", "bfloat16", "--enforce-eager", "--no-enable-prefix-caching")


@frozen
class ServerOptions:
    """Where a server listens, and what is seen of it.

    Attributes:
        host: Address to listen on; 0.0.0.0 lets other machines in, and everybody on them.
        port: Port to listen on.
        log: File for the server's log; default: it passes through, on standard error.
        every: Seconds between two lines of acceptance.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000
    log: Path | None = None
    every: Annotated[float, typer.Option(min=1)] = 30.0


def serve(
    context: typer.Context,
    path: str,
    server: ServerOptions,
    k: Annotated[int | None, typer.Option("-k", "--num-speculative-tokens", min=0)] = None,
    gpus: GpusOption = None,
    dry_run: bool = False,
    as_json: JsonOption = False,
) -> None:
    """Serve a checkpoint with vLLM and MTP: checked before, and with its acceptance watched until
    it is stopped.

    It runs the card's serve line. A checkpoint with an error of the static check is refused.
    Weights that do not fit one GPU are split over as few of this machine's as hold them. The server
    stays offline. Where this vLLM has a defect with the model, it is mended; KEEPMTP_CURES=0 serves
    with vLLM as it is. Words after `--` go to `vllm serve`, such as --max-model-len, or
    --trust-remote-code once you have read the checkpoint's Python.

    Ctrl-C or SIGTERM stops the server, and what it accepted is printed. A warning says where the
    draft is accepted far less often than it was measured: a broken draft loads in silence. The exit
    status is the server's, and not 0 if nobody stopped it.

    Example: `keepmtp serve out/tiny-glm4-moe.w4a16-fp8 --port 8001 -- --max-model-len 2048`

    Example: `keepmtp serve /data/GLM-4.7-NVFP4 --gpu sm100 --dry-run`

    Args:
        path: Checkpoint to serve: a folder or a Hub id.
        k: Tokens drafted a step; 0: none. Default: what was measured best, else the number of
            MTP layers.
        gpus: Let vLLM's loaders judge it first, on a pretended GPU from sm80 to sm120.
        dry_run: Check it, print the commands for a shell and for Docker, and stop.
    """
    from ..recipes.runtimes.vllm import NEWEST
    from ..validate.measure import cures as curing
    from ..validate.measure import foreground
    from ..validate.measure.room import tensor_parallel_size, value_of
    from ..validate.measure.serve_line import refuse_settings

    extra = tuple(context.args)
    refuse_stray_words("serve", extra)
    foreground.refuse_our_words(extra)
    is_tls = value_of(extra, "--ssl-certfile") != ""
    address = foreground.Address(host=server.host, port=server.port, is_tls=is_tls)
    # Everything that can be known is refused before the server starts: it may load for half an
    # hour.
    if not dry_run:
        foreground.refuse_taken(address)
    checked = _checked(path)
    opened = checked.readable()
    vllm = None
    try:
        vllm = chosen_vllm()
    except VLLMError:
        # The commands that are printed may be run elsewhere.
        if gpus or not dry_run:
            raise
    # Weights that do not fit one GPU are split over as few as hold them.
    size = 1
    device = ""
    version = NEWEST
    if vllm:
        version = vllm.version
        size = tensor_parallel_size(opened, vllm, extra)
        device = vllm.device
    refuse_settings(extra, version)
    cures = curing.switched_on(opened, version)
    if line := curing.told(cures, version):
        tell(line)
    best = _best_k(opened, k, checked.data.facts.num_mtp_layers, device)
    if gpus:
        from .. import api

        with spinner() as doing:
            (loaded,) = api.check_all(
                [path],
                gpus=chosen_gpus(gpus),
                tps=[size],
                num_drafts=max(1, best.k),
                progress=doing,
            )
        # What a cure mends is no reason to refuse.
        loads = loaded.data.dry
        if not (cures and loads and all(load.ok or load.cures for load in loads)):
            _refuse_errors(path, loaded)
    if size > 1:
        extra = ("--tensor-parallel-size", str(size), *extra)
    if dry_run:
        print_commands(opened, best, extra, cures, as_json=as_json)
        return
    assert vllm is not None
    life = _run(opened, best, replace(vllm, cures=cures), extra, server, address)
    if life.doubt:
        reads = f"`{_command('check', path)} --values` reads the draft's tensors"
        tell(f"warning: {life.doubt}: {reads}, `{_command('serve-check', path)}` compares")
    drafted = "served without drafting"
    if life.k:
        drafted = foreground.in_words(life)
    line = f"{path}: {life.seconds:,.0f} s with k={life.k}; {drafted}"
    status = life.status
    if not life.is_stopped:
        status = max(status, 1)  # vLLM's front end ends with 0 where its engine has died
    value = {"path": path, "why": best.why, **life.model_dump(mode="json")}
    answer(value, [line], as_json=as_json, status=status)


def _run(
    opened: "Source",
    best: "BestK",
    vllm: "VLLM",
    extra: Sequence[str],
    server: ServerOptions,
    address: "Address",
) -> "ServerLife":
    """Serve until it is stopped, and say how it went.

    Raises:
        VLLMError: this machine has no kernels for it, or its GPUs are full.
    """
    from ..validate.measure import foreground
    from ..validate.measure.bf16_copy import why_no_kernel
    from ..validate.measure.room import refuse_full_gpus
    from ..validate.measure.serve_line import serve_words
    from ..validate.measure.server import last_error

    if lack := why_no_kernel(opened, vllm):
        raise VLLMError(
            opened.where,
            "must have kernels on this machine",
            got=lack,
            cure="Serve it on a GPU; `keepmtp serve-check` measures a BF16 copy",
        )
    refuse_full_gpus(opened, vllm, extra)
    local = downloaded(opened)
    words = ["--host", server.host, "--port", str(server.port)]
    if opened.folder is None:
        # Clients ask for the repository, not for a folder of the Hub's cache.
        words += ["--served-model-name", opened.where]
    if vllm.build == "cpu":
        words += _CPU_WORDS
    line = serve_words(str(local.folder), best.k, *words, *extra)
    tell(f"k={best.k}: {best.why}")
    if best.versions:
        tell(f"vLLM {vllm.version}; {best.versions}")
    tell(shlex.join(line))
    expected = None
    if best.measured:
        expected = foreground.Expected(drafts=best.measured, measured_by=best.measured_by)
    with ExitStack() as files:
        log = sys.stderr.fileno()
        if server.log is not None:
            log = files.enter_context(open(server.log, "wb"))
        life = foreground.serve_until_stopped(
            vllm,
            line[1:],
            k=best.k,
            address=address,
            expected=expected,
            every=server.every,
            log=log,
            tell=tell,
        )
    if not life.is_stopped:
        rule = "must come up"
        if life.is_healthy:
            rule = "must serve until it is stopped"
        got = f"exit status {life.status} after {life.seconds:.0f} s"
        cure = "Read its words above, or name a file with --log"
        if server.log is not None:
            got = f"{got}: {last_error(server.log, life.status)}"
            cure = f"Read {server.log}"
        exits.say_refusal(VLLMError("vllm serve", rule, got=got, cure=cure))
    return life


def _checked(path: str) -> "Checked":
    """The checkpoint, which has no error.

    Raises:
        GateError: the check has an error; or, where the packages that read values are there, a
            scale is wrong.
        KeepMTPError: there is nothing to judge.
    """
    from .. import api
    from ..recipes.extras import missing

    (checked,) = api.check_all([path])
    _refuse_errors(path, checked)
    if Path(path).is_dir() and not missing("quantize"):
        from ..validate.check.values import with_values  # imports torch

        checked = with_values(checked, "scalars")
        _refuse_errors(path, checked)
    if warnings := len(checked.data.findings):
        tell(f"check: no errors, warnings: {warnings}: `{_command('check', path)}` has them")
    return checked


def _command(verb: str, path: str) -> str:
    return shlex.join(["keepmtp", verb, path])


def _refuse_errors(path: str, checked: "Checked") -> None:
    from ..validate.facts.findings import errors_of

    if checked.refusal is not None:
        raise checked.refusal
    if errors := errors_of(checked.data.findings):
        first, *others = errors
        got = f"{first.where}: {first.says}"
        if others:
            got += f" (and {len(others)} more: `{_command('check', path)}`)"
        rule = "must pass the check before it is served"
        raise GateError(path, rule, got=got, cure=with_path(first.cure, path))


def _best_k(opened: "Source", asked: int | None, num_mtp_layers: int, device: str) -> "BestK":
    """The number that the user says, or else the best that is known.

    Raises:
        RecipeError: vLLM cannot draft so many.
    """
    from ..validate.report.best_k import best_k

    best = best_k(opened, num_mtp_layers, device=device)
    if asked is not None and asked != best.k:
        best = replace(best, k=asked, why="as you say")
    rule = cure = ""
    if best.k and not num_mtp_layers:
        rule = "a checkpoint without an MTP block cannot draft"
        cure = "Use -k 0, or `keepmtp graft` its release's block"
    elif best.k > _MOST_K:
        rule = f"must be at most {_MOST_K}: later drafts build on guesses"
        cure = "Use -k 4 or less; `keepmtp bench` finds the best"
    elif num_mtp_layers and best.k > num_mtp_layers and best.k % num_mtp_layers:
        rule = f"with {num_mtp_layers} MTP layers vLLM drafts a multiple of them"
        cure = f"Use -k {num_mtp_layers}"
    if rule:
        raise RecipeError("-k", rule, got=best.k, cure=cure)
    return best


def print_commands(
    opened: "Source",
    best: "BestK",
    further: Sequence[str],
    cures: Sequence[str] = (),
    *,
    as_json: bool,
) -> None:
    """Print the serve line for a shell, where `cures` are switched on, and for Docker."""
    from ..validate.facts.vllm_env import TESTED
    from ..validate.measure.cures import switched_on
    from ..validate.measure.serve_line import docker_words, serve_words

    model = opened.where
    if opened.folder is not None:
        model = str(opened.folder.absolute())  # Docker mounts it
    line = serve_words(opened.where, best.k, *further, cures=cures)
    cures = switched_on(opened, TESTED[0])
    docker = docker_words(model, best.k, *further, version=TESTED[0], cures=cures)
    value = {"path": opened.where, "k": best.k, "why": best.why, "words": line, "docker": docker}
    lines = [f"# k={best.k}: {best.why}", shlex.join(line), shlex.join(docker)]
    if best.versions:
        value["versions"] = best.versions
        lines.insert(1, f"# vLLM: {best.versions}")
    answer(value, lines, as_json=as_json)
