"""`keepmtp check`: will vLLM, or SGLang, load a checkpoint, and will its MTP draft be real?

In: checkpoints, ours or anyone's. Out: findings or a JSON line for each; exit status 1 if one has
an error, 2 if there is nothing to judge.

Easy to get wrong: the JSON lines have names of their own, which other programs read (`check_json`);
they stay when a field of check.json gets another name.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from ..recipes.errors import RecipeError, size_in_words
from ..validate.facts.vllm_env import TESTED
from . import exits, findings
from .options import (
    AnyVLLMOption,
    JsonOption,
    RuntimesOption,
    chosen_gpus,
    chosen_runtimes,
    chosen_vllm,
)
from .progress import bytes_bar, spinner
from .tables import print_json, say

if TYPE_CHECKING:
    from ..validate.check.check import Checked
    from ..validate.check.reading import Level
    from ..validate.check.values import Fetch
    from ..validate.facts.dry_load import LoadAccount
    from ..validate.facts.findings import Runtime
    from ..validate.facts.results import CheckData


def check(
    paths: Annotated[
        list[str], typer.Argument(help="Checkpoints: folders or Hub ids, ours or anyone's.")
    ],
    gpus: Annotated[
        list[str] | None,
        typer.Option(
            "--gpu",
            help="Also let vLLM load it, on a pretended H100 (sm90), sm89, sm100, sm120; "
            "repeatable.",
        ),
    ] = None,
    tps: Annotated[
        list[int] | None, typer.Option("--tp", min=1, help="Tensor-parallel size; may be repeated.")
    ] = None,
    num_drafts: Annotated[int, typer.Option("-k", min=1, help="num_speculative_tokens.")] = 1,
    draft: Annotated[
        str, typer.Option("--draft", help="The draft's own checkpoint, where it has one.")
    ] = "",
    runtimes: RuntimesOption = None,
    static_only: Annotated[
        bool, typer.Option("--static-only", help="No vLLM, whatever --gpu says.")
    ] = False,
    html: Annotated[
        Path | None, typer.Option("--html", help="Also write report.json and report.html there.")
    ] = None,
    record: Annotated[
        bool,
        typer.Option(
            "--record",
            help="Keep what is found, and of which bytes, in PATH.report: for the checkpoint's "
            "report and card.",
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
            "--source",
            help="With --values: the release, a folder or ORG/NAME; weights are compared with it.",
        ),
    ] = None,
    any_vllm: AnyVLLMOption = False,
    as_json: JsonOption = False,
) -> None:
    """Judge checkpoints from config.json and headers: will vLLM load them, and will the MTP draft
    be real?

    Reads compressed-tensors, modelopt, native FP8, GPTQ, AWQ, AutoRound and Quark dialects; a Hub
    id is judged by range requests, not downloaded.
    Each finding says what will happen at serve time and what to do about it. With --gpu, vLLM's own
    target and draft classes and loaders judge too, on meta tensors for a GPU that need not be
    there: every parameter must be written, every tensor used, and each layer must get a kernel.

    A model that has no MTP block is judged in part: its packed weights, layers and index, but no
    names of vLLM's.

    With --runtime sglang, the rules are SGLang's: which draft class it has for the family, under
    which names that class asks the quantization config, and what it builds for each answer. With
    both, a checkpoint must please both.

    Exit status 1 if any checkpoint has an error, 2 if there is nothing to judge at one of the
    places. The others are judged all the same.

    With --values, bytes are read too: values that are infinite, zero or negative where none may be,
    scales of fused modules that disagree, matrices and norms that are empty. With --source, weights
    are compared with the release's. Of a repository only the wanted bytes are fetched; how many is
    said before.

    With --record, every byte of one local checkpoint is hashed, once, and check.json, report.json
    and report.html are written next to it. What is measured later, by serve-check and eval, joins
    them if the bytes are the same.

    Example: `keepmtp check /data/out nvidia/Qwen3.5-397B-A17B-NVFP4 --gpu sm100 --gpu sm90 --tp 4`

    Example: `keepmtp check out/tiny-glm4-moe.w4a16-fp8 --gpu sm100 --record`

    Example: `keepmtp check zai-org/GLM-4.7-FP8 --runtime vllm --runtime sglang`
    """
    from .. import api
    from .report import save

    err, is_dry = Console(stderr=True), bool(gpus) and not static_only
    servers = chosen_runtimes(runtimes)
    if not gpus and not static_only and (tps or num_drafts != 1 or draft):
        raise RecipeError(
            "check",
            "--tp, -k and --draft need a GPU to pretend",
            got="no --gpu",
            cure="Add --gpu sm100",
        )
    if is_dry and "vllm" not in servers:
        got = f"--runtime {servers[0]} alone"
        raise RecipeError("check", "--gpu lets vLLM load it", got=got, cure="Add --runtime vllm")
    if source is not None and values is None:
        raise RecipeError(
            "check",
            "--source is what values are compared with",
            got="no --values",
            cure="Add --values",
        )
    if html is not None:
        from ..validate.report.html import require_extra

        require_extra()
    loads: dict[str, Any] = {"runtimes": servers}
    if is_dry:
        loads |= {
            "gpus": chosen_gpus(gpus or []),
            "tps": tps or [1],
            "num_drafts": num_drafts,
            "draft": draft,
        }
        loads["any_vllm"] = any_vllm
        chosen_vllm(any_vllm=any_vllm)
    keep, status = None, 0
    if record:
        from .record import recorder

        keep = recorder(paths, err)
    with spinner(err, is_shown=is_dry) as doing:
        for number, checked in enumerate(api.check_all(paths, **loads, progress=doing), start=1):
            if values is not None:
                checked = _with_values(checked, values, source, err)
            _show(checked, servers, as_json=as_json)
            if checked.refusal is not None:
                status = exits.REFUSAL
                continue
            if not checked.data.ok:
                status = max(status, exits.FINDINGS)
            if html is not None:
                folder = (
                    html if len(paths) == 1 else html / f"{number}-{Path(checked.data.path).name}"
                )
                page = save(folder, checked.data, vllm=TESTED[0], opened=checked.source)
                say(err, f"report: {page}")
            if keep is not None:
                say(err, f"recorded: {keep(checked)}")
    if status:
        raise typer.Exit(status)


def _with_values(checked: "Checked", level: "Level", source: str | None, err: Console) -> "Checked":
    """Also with what the value check finds; a checkpoint that the static check cannot read is left
    as it is.
    """
    from ..checkpoints.hub_client import stopped_by_signals
    from ..recipes.extras import require_extra

    require_extra("check --values", "quantize")
    from ..validate.check.values import Watch, with_values

    def fetching(fetch: "Fetch") -> None:
        what = f"{fetch.where}: {fetch.num_tensors:,} tensors, {size_in_words(fetch.num_bytes)}"
        say(err, f"{what} by {fetch.num_requests:,} range requests")

    with stopped_by_signals():
        watch = Watch(reading=bytes_bar(err, "reading values"), fetching=fetching)
        return with_values(checked, level, source=source, watch=watch)


def _show(checked: "Checked", servers: "Sequence[Runtime]", *, as_json: bool) -> None:
    if as_json:
        print_json(check_json(checked.data, checked.accounts) | {"runtimes": list(servers)})
    elif checked.refusal is not None:
        exits.say_refusal(checked.refusal)
    else:
        findings.show(Console(), checked.data, servers=servers)


def check_json(data: "CheckData", accounts: "Sequence[LoadAccount]" = ()) -> dict[str, Any]:
    """What `keepmtp check --json` prints of one checkpoint."""
    found = []
    for finding in data.findings:
        cure = findings.with_path(finding.cure, data.path)
        found.append(finding.model_dump(exclude={"origin"}) | {"cure": cure})
    printed = {
        "path": data.path,
        "ok": data.ok,
        "findings": found,
        "facts": data.facts.model_dump(),
    }
    if accounts:
        printed["dry"] = [_load_json(account) for account in accounts]
    return printed


def _load_json(account: "LoadAccount") -> dict[str, Any]:
    load = account.load
    models = {}
    for role in ("target", "draft"):
        model, written = account.of(role)
        models[role] = {
            "class": model.cls,
            "parameters": model.num_params,
            "written": model.num_written,
            "shared": list(model.shared),
            "padded": [fault.param for fault in written.padded],
            "kernels": [kernel.model_dump() for kernel in model.kernels],
        }
    return {
        "gpu": load.gpu,
        "tp": load.tp,
        "num_drafts": load.k,
        "loads": load.failure is None,
        "failure": load.failure.model_dump() if load.failure else None,
        "runner": load.runner,
        "quant_config": account.quant_config,
        **models,
        "seconds": load.seconds,
        "peak_mib": load.peak_mib,
    }
