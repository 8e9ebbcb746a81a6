"""The arguments and options that several verbs have, with their help."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from ..recipes.errors import RecipeError

if TYPE_CHECKING:
    from ..validate.dryload.facts import GPU

# Names that people type instead of the one that vLLM's kernels go by.
_GPU_NAMES: Mapping[str, str] = {
    **dict.fromkeys(("h100", "h200", "h800", "h20", "gh200", "hopper"), "sm90"),
    **dict.fromkeys(("b100", "b200", "gb200", "b300", "gb300", "blackwell"), "sm100"),
    **dict.fromkeys(("rtx5090", "rtxpro6000", "gb10"), "sm120"),
}

ModelArgument = Annotated[
    str,
    typer.Argument(
        help="A model's name, a recipe's full name or a recipe file (see `keepmtp ls`); or a checkpoint: "
        "a folder, a Hub id, or the address of its page."
    ),
]
SourceOption = Annotated[
    str | None, typer.Option("--source", help="Folder or Hub id of the released checkpoint; default: the recipe's.")
]
SchemeOption = Annotated[
    str | None,
    typer.Option(
        "--scheme",
        help="Another variant of the model, or a scheme for every quantized group. Needed where MODEL is a checkpoint.",
    ),
]
MtpOption = Annotated[
    str | None,
    typer.Option(
        "--mtp",
        help="MTP block: `source`, `bf16`, a scheme, or `auto`: the smallest that "
        "keeps enough acceptance, measured during the run; default: the recipe's.",
    ),
]
CalibrationOption = Annotated[
    str | None,
    typer.Option(
        "--calibration",
        help="A named block of recipes/calibrations.yaml, for schemes that need batches; default: the recipe's, "
        "else ultrachat-256x2048.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for machines instead of tables.")]
TimeoutOption = Annotated[float, typer.Option(min=1, help="Seconds a server may take to be healthy.")]
TrustOption = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="You have read the checkpoint's own Python: a recipe with `model_code: checkpoint` may run it, and the "
        "output gets its .py files.",
    ),
]


def chosen_gpus(words: Sequence[str]) -> "list[GPU]":
    """The GPUs to pretend, in keepmtp's order.

    Raises:
        RecipeError: a name that is not among them; the cure says which one is meant.
    """
    from ..validate.dryload.facts import GPUS

    for word in words:
        if word not in GPUS:
            meant = _GPU_NAMES.get(word.lower().replace(" ", "").replace("-", "").replace("_", ""))
            cure = f"{word} is {meant}: write --gpu {meant}" if meant else "Take the nearest"
            raise RecipeError("--gpu", f"must be one of {', '.join(GPUS)}", got=word, cure=cure)
    return [gpu for gpu in GPUS if gpu in words]
