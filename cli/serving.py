"""What `keepmtp serve` does with a checkpoint: judge it, choose k, become the server.

In: a checkpoint and the options of the verb. Out: a server, or the commands to be run elsewhere. It
imports what help must not wait for, so the verb imports it when it runs.
"""

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from .. import api
from ..checkpoints.dialects.choose import attention_backends
from ..checkpoints.source import Source
from ..recipes.errors import GateError, RecipeError, VLLMError
from ..recipes.tensor_parallel import Split
from ..validate.check.check import Checked
from ..validate.facts.findings import errors_of
from ..validate.facts.vllm_env import VLLM
from ..validate.measure.bf16_copy import why_no_kernel
from ..validate.measure.harness import refuse_drafts
from ..validate.measure.room import options_of, refuse_full_gpus
from ..validate.measure.serve_line import method_words, separate_draft, serve_words
from ..validate.measure.server import become
from ..validate.report.best_k import BestK, best_k
from .findings import with_path, with_values_read
from .progress import downloaded
from .tables import answer, tell

_MOST_K = 16
# On a CPU the gated delta net cannot combine prefix caching with drafting (vLLM 0.32).
_CPU_WORDS = ("--dtype", "bfloat16", "--enforce-eager", "--no-enable-prefix-caching")


def become_server(opened: Source, best: BestK, vllm: VLLM, further: Sequence[str]) -> NoReturn:
    """Turn this process into vLLM's server.

    Raises:
        VLLMError: this machine has no kernels for it, or its GPUs are full.
    """
    lack = why_no_kernel(opened, vllm)
    if lack:
        raise VLLMError(
            opened.where,
            "must have kernels on this machine",
            got=lack,
            cure="Serve it on a GPU; `keepmtp eval` measures a BF16 copy",
        )
    refuse_full_gpus(opened, vllm, further)
    local = downloaded(opened)
    words = list[str]()
    if opened.folder is None:
        # Clients ask for the repository, not for a folder of the Hub's cache.
        words += ["--served-model-name", opened.where]
    if vllm.build == "cpu":
        words += _CPU_WORDS
    line = serve_words(str(local.folder), best.k, *method_words(opened), *words, *further)
    tell(f"k={best.k}: {best.why}")
    if best.versions:
        tell(f"vLLM {vllm.version}; {best.versions}")
    tell(shlex.join(line))
    become(vllm, line[1:])


def attention_words(opened: Source, vllm: VLLM | None, extra: Sequence[str]) -> tuple[str, ...]:
    """The attention that the checkpoint needs on the GPUs of this machine; without any, it is
    said.
    """
    names = set[str]()
    if vllm:
        names = {f"sm{gpu.capability.partition('.')[0]}0" for gpu in vllm.gpus}
    words = ()
    if "--attention-backend" not in options_of(extra):
        for gpu, backend in attention_backends(opened.config).items():
            if gpu in names:
                words = ("--attention-backend", backend)
            elif not names:
                tell(f"on {gpu} add `-- --attention-backend {backend}`")
    return words


def draft_at(source: Source, *, is_served: bool) -> tuple[str, ...]:
    """The words that name a draft of its own: its folder, or its repository where another machine
    may serve it.
    """
    if is_served:
        source = downloaded(source)
    place = source.where
    if source.folder is not None:
        place = str(source.folder.absolute())
    return separate_draft(place)


def checked_errors(path: str, draft: str, split: Split) -> Checked:
    """The checkpoint, which has no error; with its draft, where that has a checkpoint of its own.

    Raises:
        GateError: the check has an error; or, where the packages that read values are there, a
            scale or a norm of the MTP block is wrong.
        KeepMTPError: there is nothing to judge.
    """
    (checked,) = api.check_all([path], draft=draft, tps=[split])
    refuse_errors(path, checked, draft=draft)
    level = "norms"
    if Path(path).is_dir():
        level = "scalars"
    checked = with_values_read(checked, level)
    refuse_errors(path, checked, draft=draft)
    warnings = len(checked.data.findings)
    if warnings:
        tell(f"check: no errors, warnings: {warnings}: `{check_command(path, draft)}` has them")
    return checked


def check_command(path: str, draft: str) -> str:
    """The command that checks the checkpoint, with its draft."""
    words = ["keepmtp", "check", path]
    if draft:
        words += ["--draft", draft]
    return shlex.join(words)


def refuse_errors(path: str, checked: Checked, *, draft: str = "") -> None:
    """Refuse a checkpoint that is not to be served.

    Raises:
        GateError: it has an error; names the first.
    """

    if checked.refusal is not None:
        raise checked.refusal
    errors = errors_of(checked.data.findings)
    if errors:
        first, *others = errors
        got = f"{first.where}: {first.says}"
        if others:
            got += f" (and {len(others)} more: `{check_command(path, draft)}`)"
        rule = "must pass the check before it is served"
        raise GateError(path, rule, got=got, cure=with_path(first.cure, path))


def chosen_k(opened: Source, asked: int | None, num_mtp_layers: int, device: str) -> BestK:
    """The number that the user says, or else the best that is known.

    Raises:
        RecipeError: vLLM cannot draft so many.
    """
    best = best_k(opened, num_mtp_layers, device=device)
    if asked is not None and asked != best.k:
        best = replace(best, k=asked, why="as you say")
    rule = cure = ""
    if best.k and not num_mtp_layers:
        rule = "a checkpoint without an MTP block cannot draft"
        cure = "Use -k 0, or `keepmtp fix --from` its release"
    elif best.k > _MOST_K:
        rule = f"must be at most {_MOST_K}: later drafts build on guesses"
        cure = "Use -k 4 or less; `keepmtp bench` finds the best"
    if rule:
        raise RecipeError("-k", rule, got=best.k, cure=cure)
    if num_mtp_layers:
        refuse_drafts(opened, best.k, option="-k")
    return best


def print_command(
    opened: Source,
    best: BestK,
    further: Sequence[str],
    cures: Sequence[str] = (),
    *,
    host: str,
    port: str,
    as_json: bool,
) -> None:
    """Print the serve line, where `cures` are switched on."""
    further = ("--host", host, "--port", port, *method_words(opened), *further)
    line = serve_words(opened.where, best.k, *further, cures=cures)
    value = {"path": opened.where, "k": best.k, "why": best.why, "words": line}
    lines = [f"# k={best.k}: {best.why}", shlex.join(line)]
    if best.versions:
        value["versions"] = best.versions
        lines.insert(1, f"# vLLM: {best.versions}")
    answer(value, lines, as_json=as_json)
