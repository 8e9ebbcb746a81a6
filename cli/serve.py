"""`keepmtp serve`: the card's serve line, checked and then run.

In: a checkpoint, and words for `vllm serve` after `--`. Out: this process becomes vLLM's server.
"""

from dataclasses import replace
from typing import Annotated

import typer

from ..recipes.errors import VLLMError
from .options import (
    DraftOption,
    DryRunOption,
    JsonOption,
    K,
    PathArgument,
    VLLMWords,
    chosen_vllm,
    refuse_stray_words,
)
from .tables import tell


def serve(
    path: PathArgument,
    vllm_words: VLLMWords = None,
    host: Annotated[str, typer.Option(help="0.0.0.0 lets other machines in.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
    k: Annotated[
        int | None, typer.Option(*K, min=0, help="Tokens drafted a step; 0: none.")
    ] = None,
    draft: DraftOption = "",
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Check a checkpoint, and serve it with vLLM and MTP.

    It runs the serve line of the card. A checkpoint that fails the static check is refused. Weights
    that do not fit one GPU are split over as few GPUs of this machine as hold them. The server
    stays offline. Where this vLLM has a known defect with the model, the defect is cured;
    KEEPMTP_CURES=0 serves with vLLM as it is. Words after `--` go to `vllm serve`, such as
    --max-model-len, or --trust-remote-code once you have read the checkpoint's Python. Without -k,
    it drafts as many tokens as were measured to be best, otherwise one for each MTP layer. --host
    0.0.0.0 lets in every machine that can reach this one. --dry-run prints the command.

    The process becomes vLLM's own: its log, its signals and its exit status. While requests are
    answered, vLLM logs how many drafts were accepted, by position.

    \b
    Example: `keepmtp serve out/tiny-glm4-moe.w4a16-fp8 --port 8001 -- --max-model-len 2048`
    Example: `keepmtp serve /data/GLM-4.7-NVFP4 --dry-run`
    """
    from ..recipes.runtimes.vllm import NEWEST
    from ..validate.measure import cures as curing
    from ..validate.measure.room import split_of, tensor_parallel_size
    from ..validate.measure.serve_line import refuse_our_words, refuse_pipeline, refuse_settings
    from . import serving

    extra = tuple(vllm_words or ())
    refuse_stray_words("serve", extra)
    refuse_our_words(extra)
    # Everything that can be known is refused before the server starts: it may load for half an
    # hour.
    checked = serving.checked_errors(path, draft, split_of(extra))
    opened = checked.readable()
    drafting = opened
    num_mtp_layers = checked.data.facts.num_mtp_layers
    if checked.draft is not None:
        drafting = checked.draft.source
        num_mtp_layers = checked.draft.view.num_mtp_layers
    vllm = None
    try:
        vllm = chosen_vllm()
    except VLLMError:
        # The commands that are printed may be run elsewhere.
        if not dry_run:
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
    line = curing.told(cures, version)
    if line:
        tell(line)
    best = serving.chosen_k(drafting, k, num_mtp_layers, device)
    refuse_pipeline(drafting, best.k, extra)
    if size > 1:
        extra = ("--tensor-parallel-size", str(size), *extra)
    extra = (*serving.attention_words(opened, vllm, extra), *extra)
    if draft:
        extra = (*serving.draft_at(drafting, is_served=not dry_run), *extra)
    if dry_run:
        where = {"host": host, "port": str(port)}
        serving.print_command(opened, best, extra, cures, **where, as_json=as_json)
        return
    assert vllm is not None
    address = ("--host", host, "--port", str(port))
    serving.become_server(opened, best, replace(vllm, cures=cures), (*address, *extra))
