"""`keepmtp check`: will vLLM, or SGLang, load a checkpoint, and will its MTP draft be real?

In: checkpoints, ours or anyone's. Out: findings or a JSON line for each; exit status 1 if one has an error, 2 if there
is nothing to judge.

Easy to get wrong: the JSON lines have names of their own, which other programs read (`check_json`); they stay when a
field of check.json gets another name.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from ..recipes.errors import RecipeError, size_in_words
from ..validate.facts.vllm_env import TESTED
from . import exits, findings, tables
from .options import AnyVLLMOption, JsonOption, chosen_gpus, chosen_runtimes, chosen_vllm
from .tables import escape

if TYPE_CHECKING:
    from ..validate.check.check import Checked
    from ..validate.check.reading import Level
    from ..validate.check.values import Fetch
    from ..validate.facts.dry_load import LoadAccount, Role
    from ..validate.facts.findings import Runtime
    from ..validate.facts.results import CheckData


def check(
    paths: Annotated[list[str], typer.Argument(help="Checkpoints: folders or Hub ids, ours or anyone's.")],
    gpus: Annotated[
        list[str] | None,
        typer.Option(
            "--gpu", help="Also let vLLM load it, on a pretended H100 (sm90), sm89, sm100, sm120; repeatable."
        ),
    ] = None,
    tps: Annotated[list[int] | None, typer.Option("--tp", min=1, help="Tensor-parallel size; may be repeated.")] = None,
    num_drafts: Annotated[int, typer.Option("-k", min=1, help="num_speculative_tokens.")] = 1,
    draft: Annotated[str, typer.Option("--draft", help="The draft's own checkpoint, where it has one.")] = "",
    runtimes: Annotated[
        list[str] | None,
        typer.Option(
            "--runtime",
            help="The server that is to load it: vllm (the default) or sglang; may be repeated.",
        ),
    ] = None,
    static_only: Annotated[bool, typer.Option("--static-only", help="No vLLM, whatever --gpu says.")] = False,
    html: Annotated[Path | None, typer.Option("--html", help="Also write report.json and report.html there.")] = None,
    record: Annotated[
        bool,
        typer.Option(
            "--record",
            help="Keep what is found, and of which bytes, in PATH.report: for the checkpoint's report and card.",
        ),
    ] = False,
    values: Annotated[
        Literal["scales", "scalars", "all"] | None,
        typer.Option(
            help="Also read values: every scale, norm and small MTP tensor (`scales`, the "
            "default), scales of one value alone (`scalars`), or every byte (`all`).",
            metavar="[LEVEL]",
        ),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(
            "--source", help="With --values: the release, a folder or ORG/NAME; weights are compared with it."
        ),
    ] = None,
    any_vllm: AnyVLLMOption = False,
    as_json: JsonOption = False,
) -> None:
    """Judge checkpoints from config.json and headers: will vLLM load them, and will the MTP draft be real?

    Reads compressed-tensors, modelopt, native FP8, GPTQ, AWQ, AutoRound and Quark dialects; a Hub id is judged by range
    requests, not downloaded.
    Each finding says what will happen at serve time and what to do about it. With --gpu, vLLM's own target and draft
    classes and loaders judge too, on meta tensors for a GPU that need not be there: every parameter must be written,
    every tensor used, and each layer must get a kernel.

    A model that has no MTP block is judged in part: its packed weights, layers and index, but no names of vLLM's.

    With --runtime sglang, the rules are SGLang's: which draft class it has for the family, under which names that class
    asks the quantization config, and what it builds for each answer. With both, a checkpoint must please both.

    Exit status 1 if any checkpoint has an error, 2 if there is nothing to judge at one of the places. The others are
    judged all the same.

    With --values, bytes are read too: values that are infinite, zero or negative where none may be, scales of fused
    modules that disagree, matrices and norms that are empty. With --source, weights are compared with the release's.
    Of a repository only the wanted bytes are fetched; how many is said before.

    With --record, every byte of one local checkpoint is hashed, once, and check.json, report.json and report.html are
    written beside it. What is measured later, by serve-check and eval, joins them if the bytes are the same.

    Example: `keepmtp check /data/out nvidia/Qwen3.5-397B-A17B-NVFP4 --gpu sm100 --gpu sm90 --tp 4`

    Example: `keepmtp check out/tiny-glm4-moe.w4a16-fp8 --gpu sm100 --record`

    Example: `keepmtp check zai-org/GLM-4.7-FP8 --runtime vllm --runtime sglang`
    """
    from .. import api
    from .report import save

    err = Console(stderr=True)
    if not gpus and not static_only and (tps or num_drafts != 1 or draft):
        raise RecipeError("check", "--tp, -k and --draft need a GPU to pretend", got="no --gpu", cure="Add --gpu sm100")
    if html is not None:
        from ..validate.report.html import require_extra

        require_extra()
    is_dry = bool(gpus) and not static_only
    chosen = chosen_gpus(gpus or []) if is_dry else []
    servers = chosen_runtimes(runtimes or [])
    if is_dry and "vllm" not in servers:
        raise RecipeError(
            "check", "--gpu lets vLLM load it", got=f"--runtime {servers[0]} alone", cure="Add --runtime vllm"
        )
    if is_dry:
        chosen_vllm(any_vllm=any_vllm)
    if source is not None and values is None:
        raise RecipeError("check", "--source is what values are compared with", got="no --values", cure="Add --values")
    notes, status = None, 0
    if record:
        from .record import begin

        notes = begin(paths)
    with spinner(err, is_shown=is_dry) as doing:
        loads = {"gpus": chosen, "tps": tps or [1], "num_drafts": num_drafts, "draft": draft, "any_vllm": any_vllm}
        loads["runtimes"] = servers
        for number, found in enumerate(api.check_all(paths, **loads, progress=doing)):
            checked = found if values is None else _with_values(found, values, source, err)
            status = max(status, _status(checked))
            _show(checked, servers, as_json=as_json)
            if checked.refusal is not None:
                continue
            if html is not None:
                folder = html if len(paths) == 1 else html / f"{number + 1}-{Path(paths[number]).name}"
                page = save(folder, checked.data, vllm=TESTED[0], opened=checked.source)
                tables.say(err, f"report: {page}")
            if notes is not None:
                tables.say(err, f"recorded: {notes.keep(checked)}")
    if status:
        raise typer.Exit(status)


def _with_values(checked: "Checked", level: "Level", source: str | None, err: Console) -> "Checked":
    """Also with what the value check finds; a checkpoint that the static check cannot read is left as it is."""
    from ..checkpoints.hub_client import stopped_by_signals
    from ..recipes.extras import require_extra

    require_extra("check --values", "quantize")
    from ..validate.check.values import Watch, with_values
    from .progress import bytes_bar

    def say(fetch: "Fetch") -> None:
        line = f"{fetch.where}: {fetch.num_tensors:,} tensors, {size_in_words(fetch.num_bytes)} by "
        line += f"{fetch.num_requests:,} range requests"
        tables.say(err, line)

    watch = Watch(reading=bytes_bar(err, "reading values"), fetching=say)
    with stopped_by_signals():
        return with_values(checked, level, source=source, watch=watch)


def _show(checked: "Checked", servers: "Sequence[Runtime]", *, as_json: bool) -> None:
    from ..validate.check.other_readers import other_readers

    readers = other_readers(checked.runtime) if checked.runtime else ()
    if as_json:
        printed = check_json(checked.data, checked.accounts)
        printed["runtimes"] = list(servers)
        tables.print_json(printed | ({"other_readers": readers} if readers else {}), indent=None)
    elif checked.refusal is not None:
        exits.say_refusal(checked.refusal)
    else:
        findings.show(Console(), checked.data, readers, servers=servers)


def _status(checked: "Checked") -> int:
    if checked.refusal is not None:
        return exits.REFUSAL
    return 0 if checked.data.ok else exits.FINDINGS


def check_json(data: "CheckData", accounts: "Sequence[LoadAccount]" = ()) -> dict[str, Any]:
    """What `keepmtp check --json` prints of one checkpoint."""
    printed: dict[str, Any] = {
        "path": data.path,
        "ok": data.ok,
        "findings": [
            finding.model_dump(exclude={"origin"}) | {"cure": findings.with_path(finding.cure, data.path)}
            for finding in data.findings
        ],
        "facts": data.facts.model_dump(),
    }
    if accounts:
        printed["dry"] = [_load_json(account) for account in accounts]
    return printed


def _load_json(account: "LoadAccount") -> dict[str, Any]:
    load = account.load
    return {
        "gpu": load.gpu,
        "tp": load.tp,
        "num_drafts": load.k,
        "loads": load.failure is None,
        "failure": load.failure.model_dump() if load.failure else None,
        "runner": load.runner,
        "quant_config": account.quant_config,
        "target": _model_json(account, "target"),
        "draft": _model_json(account, "draft"),
        "seconds": load.seconds,
        "peak_mib": load.peak_mib,
    }


def _model_json(account: "LoadAccount", role: "Role") -> dict[str, Any]:
    model, written = account.of(role)
    return {
        "class": model.cls,
        "parameters": model.num_params,
        "written": model.num_written,
        "shared": list(model.shared),
        "padded": [fault.param for fault in written.padded],
        "kernels": [kernel.model_dump() for kernel in model.kernels],
    }


@contextmanager
def spinner(err: Console, *, is_shown: bool) -> "Iterator[Callable[[str], None]]":
    """What a dry load does now, on a terminal."""
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=err, transient=True, disable=not (is_shown and err.is_terminal)) as progress:
        task = progress.add_task("starting vLLM", total=None)
        yield lambda doing: progress.update(task, description=escape(doing))
