"""`keepmtp check`: will vLLM, or SGLang, load a checkpoint, and will its MTP draft be real?

In: checkpoints, ours or anyone's. Out: findings or a JSON line for each; exit status 1 if one has
an error, 2 if there is nothing to judge.
"""

import os
from typing import Annotated, Literal

import typer

from ..recipes.errors import RecipeError, did_you_mean
from ..recipes.frozen import Json, frozen
from . import exits
from .options import (
    DraftOption,
    GpusOption,
    JsonOption,
    PathsArgument,
    TpsOption,
    VLLMsOption,
    chosen_gpus,
    chosen_vllm,
)
from .progress import bytes_bar, live_line
from .tables import tell


@frozen
class ServerOptions:
    """Who is to load the checkpoints, and how."""

    gpus: GpusOption = None
    tps: TpsOption = None
    k: Annotated[int, typer.Option("-k", min=1, help="Tokens drafted a step.")] = 1
    draft: DraftOption = ""
    versions: VLLMsOption = None
    runtimes: Annotated[
        list[str] | None,
        typer.Option("--runtime", help="Server that loads it; may be repeated."),
    ] = None

    def words(self) -> Json:
        """What is loaded, and how: words for `api.check_all`.

        Raises:
            RecipeError: what cannot be meant.
            VLLMError: there is no vLLM.
        """
        from ..validate.check.check import RULES_OF
        from ..validate.dryload.versions import named

        asked = self.runtimes or ["vllm"]
        for word in asked:
            if word not in RULES_OF:
                cure = did_you_mean(word, RULES_OF, otherwise="Repeat --runtime for each")
                must = f"must be one of {', '.join(RULES_OF)}"
                raise RecipeError("--runtime", must, got=word, cure=cure)
        servers = [server for server in RULES_OF if server in asked]
        loads: Json = {"runtimes": servers, "draft": self.draft, "tps": self.tps or [1]}
        if not self.gpus:
            if self.k != 1 or self.versions:
                rule = "-k and --vllm need a GPU to pretend"
                raise RecipeError("check", rule, got="no --gpu", cure="Add --gpu sm100")
            return loads
        if "vllm" not in servers:
            got = f"--runtime {servers[0]} alone"
            cure = "Add --runtime vllm"
            raise RecipeError("check", "--gpu lets vLLM load it", got=got, cure=cure)
        gpus = chosen_gpus(self.gpus)
        if not self.versions:
            chosen_vllm()
        for word in named(self.versions or ()):
            if os.path.exists(word):
                tell(f"{word}: its Python runs here, with your rights, in no sandbox")
        return loads | {
            "gpus": gpus,
            "num_drafts": self.k,
            "vllms": self.versions or (),
        }


def check(
    paths: PathsArgument,
    servers: ServerOptions,
    record: Annotated[
        bool, typer.Option("--record", help="Keep what is found in PATH.report.")
    ] = False,
    values: Annotated[
        Literal["scales", "scalars", "all"] | None,
        typer.Option(metavar="[LEVEL]", help="Also read values: `scales`, `scalars`, or `all`."),
    ] = None,
    source: Annotated[
        str | None, typer.Option(help="With --values: the release, to compare with.")
    ] = None,
    modules: Annotated[
        bool, typer.Option("--modules", help="Also say what vLLM builds of each module.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Judge checkpoints from config.json and headers: will vLLM load them, and will the MTP draft
    be real?

    Reads compressed-tensors, modelopt, native FP8, GPTQ, AWQ, AutoRound and Quark dialects; a Hub
    id is judged by range requests, not downloaded. Each finding says what will happen at serve time
    and what to do about it.

    With --gpu, vLLM's own target and draft classes and loaders judge too, on meta tensors, for a
    GPU that need not be there: every parameter must be written, every tensor used, and each layer
    must get a kernel. Name it H100, or sm80 to sm120; repeat it for several. With --vllm, other
    versions load it (0.31.0,0.33.0, `all`). Their Python is fetched once, and runs over the
    installed packages, with your rights. So does that of a folder or wheel: name only one that you
    trust.

    With --runtime sglang, the rules are SGLang's: which draft class it has for the family, under
    which names that class asks the quantization config, and what it builds for each answer. With
    both, a checkpoint must please both.

    Exit status 1 if a checkpoint has an error with any of the versions; defects of vLLM that
    `keepmtp serve` and `keepmtp eval` cure are named, and do not count. 2 if there is nothing to
    judge at one of the places, or a version does not start; the others are judged all the same.

    With --values, bytes are read too: values that are infinite, zero or negative where none may be,
    scales of fused modules that disagree, matrices and norms that are empty. LEVEL is `scales`:
    every scale, norm and small MTP tensor; `scalars`: scales of one value and norms of the MTP
    block; or `all`: every byte. With --source, weights are compared with the release's. Of a
    repository only these bytes are fetched, and their number is printed before.

    With --record, every byte of one local checkpoint is hashed, once, and check.json and
    report.json are written next to it (with --draft, next to the draft). What is measured later, by
    eval and bench, joins them if the bytes are the same.

    \b
    Example: `keepmtp check /data/out nvidia/Qwen3.5-397B-A17B-NVFP4 --gpu sm100 --gpu sm90 --tp 4`
    Example: `keepmtp check out/tiny-glm4-moe.w4a16-fp8 --gpu sm90 --vllm 0.31.0,0.33.0`
    Example: `keepmtp check nvidia/Qwen3.5-397B-A17B-NVFP4 --modules`
    Example: `keepmtp check zai-org/GLM-4.7-FP8 --runtime vllm --runtime sglang`
    """
    from .. import api
    from ..recipes.extras import require_extra
    from . import findings
    from .session import recorder

    loads = servers.words()
    if source is not None and values is None:
        rule = "--source is what values are compared with"
        raise RecipeError("check", rule, got="no --values", cure="Add --values")
    if values is not None:
        require_extra("check --values", "quantize")
    keep = None
    status = 0
    if record:
        keep = recorder(paths, servers.draft)
    with live_line() as doing:
        for checked in api.check_all(paths, **loads, progress=doing):
            if values is not None:
                from ..validate.check.values import with_values  # imports torch

                # Of a repository, threads fetch: Ctrl-C ends them, too.
                with exits.soon():
                    reading = bytes_bar("reading values")
                    checked = with_values(checked, values, source=source, reading=reading)
            ended = findings.show(checked, loads["runtimes"], has_modules=modules, as_json=as_json)
            status = max(status, ended)
            if checked.refusal is None and keep is not None:
                tell(f"recorded: {keep(checked)}")
    if status:
        raise typer.Exit(status)
