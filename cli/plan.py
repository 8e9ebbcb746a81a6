"""`keepmtp plan`: the plan for every tensor, from headers alone.

In: a model and choices. Out: tables, or JSON. Nothing is written.
"""

from typing import Annotated

import typer

from .options import JsonOption, ModelOptions


def plan(
    choices: ModelOptions,
    gpu_memory: Annotated[
        str | None,
        typer.Option("--gpu-memory", "--gpu", help="A GPU's GiB, or its name, such as H100."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what would become of every tensor, from headers alone: no weight is read, nothing is
    written.

    Works on a folder or, by range requests, on a Hub id, in seconds even for 130,000 tensors. Of a
    calibrated recipe it also says on what it is calibrated, and whether the backbone and the MTP
    block can be. At the end it says what a run needs of memory and disk, here or on a machine that
    you name, how many GPUs serve it, and what weights and a token of the KV cache take of each. For
    a checkpoint without --scheme: the variants that fit it, their sizes, and the GPUs that hold
    them. The options of the model mean what they mean for `keepmtp quantize`.

    \b
    Example: `keepmtp plan dsv4-flash --source /data/DeepSeek-V4-Flash --scheme w4a16-fp8`
    Example: `keepmtp plan /data/my-fine-tune --scheme nvfp4a16-fp8`
    Example: `keepmtp plan glm-4.5-air.nvfp4-fp8 --gpu-memory H100`
    """
    from ..checkpoints.source import uncollected
    from ..quantize.plan.checkpoint_as_model import NoSchemeError
    from . import plan_tables

    try:
        made = choices.plan()
    except NoSchemeError as unchosen:
        plan_tables.show_fits(unchosen, as_json=as_json)
        return
    with uncollected():
        plan_tables.show(made, as_json=as_json, gpu_memory=gpu_memory)
