"""The arguments and options that several verbs have, with their help."""

import re
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from ..recipes.errors import RecipeError, did_you_mean

if TYPE_CHECKING:
    from ..validate.facts.dry_load import GPU
    from ..validate.facts.findings import Runtime
    from ..validate.facts.vllm_env import VLLM

# Names that people type instead of the one that vLLM's kernels go by, without NVIDIA, RTX and signs.
_GPU_NAMES: Mapping[str, str] = {
    **dict.fromkeys(("a100", "a800", "a30", "a10", "a10g", "a40", "a6000", "3090", "ampere", "sm86"), "sm80"),
    **dict.fromkeys(("l40s", "l40", "l4", "4080", "4090", "6000ada", "ada"), "sm89"),
    **dict.fromkeys(("h100", "h200", "h800", "h20", "gh200", "hopper"), "sm90"),
    **dict.fromkeys(("b100", "b200", "gb200", "b300", "gb300", "blackwell", "sm103"), "sm100"),
    **dict.fromkeys(("5080", "5090", "pro6000", "gb10", "sm121"), "sm120"),
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
MtpSourceOption = Annotated[
    str | None,
    typer.Option(
        "--mtp-source",
        help="Folder or Hub id of the MTP block, for a release that has none; default: the recipe's. "
        "Only its MTP tensors are read.",
    ),
]
GpusOption = Annotated[
    int | None,
    typer.Option("--gpus", min=1, help="Say what a run needs on so many GPUs, a process each; default: those here."),
]
GpuMemoryOption = Annotated[
    str | None,
    typer.Option(
        "--gpu-memory",
        "--gpu",
        help="Say it for another machine: GiB of one GPU, or its name, such as A100, H100, B200 or 5090.",
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
ModelCodeOption = Annotated[
    bool,
    typer.Option(
        "--run-model-code",
        help="Tasks such as humaneval may run what the model writes: in bubblewrap, or with your rights without it.",
    ),
]
AnyVLLMOption = Annotated[
    bool,
    typer.Option(
        "--any-vllm",
        help="Also run a vLLM that keepmtp was not tested with. Its version is in every result.",
    ),
]
PretendedOption = Annotated[
    list[str] | None,
    typer.Option("--gpu", help="GPU that vLLM pretends for the dry load at the end; may be repeated. Default sm100."),
]
StaticOnlyOption = Annotated[
    bool, typer.Option("--static-only", help="End with the check alone: vLLM does not load the result.")
]
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
        RecipeError: a name that means none of them; the cure has the nearest.
    """
    from ..validate.facts.dry_load import GPUS

    meant = {word: re.sub(r"nvidia|geforce|rtx|[\s_-]", "", word.lower()) for word in words}
    meant = {word: _GPU_NAMES.get(name, name) for word, name in meant.items()}
    for word, name in meant.items():
        if name not in GPUS:
            cure = did_you_mean(name, (*GPUS, *_GPU_NAMES), otherwise="Name the card, such as H100, or one of these")
            if "," in word:
                cure = f"Repeat it: {' '.join(f'--gpu {each}' for each in word.split(','))}"
            if name in _GPU_NAMES.values():
                cure = f"{word} is {name}, which is not judged: leave --gpu out"
            raise RecipeError("--gpu", f"must be one of {', '.join(GPUS)}", got=word, cure=cure)
    return [gpu for gpu in GPUS if gpu in meant.values()]


def chosen_runtimes(words: Sequence[str]) -> "list[Runtime]":
    """The servers that are to load a checkpoint; vLLM where none is named.

    Raises:
        RecipeError: a name that is not among them.
    """
    from ..validate.check.check import RULES_OF

    for word in words:
        if word not in RULES_OF:
            cure = did_you_mean(word, RULES_OF, otherwise="Name one of them; --runtime may be repeated")
            raise RecipeError("--runtime", f"must be one of {', '.join(RULES_OF)}", got=word, cure=cure)
    return [server for server in RULES_OF if server in (words or ("vllm",))]


def gpus_at_the_end(words: Sequence[str] | None, *, static_only: bool) -> "tuple[GPU, ...]":
    """The GPUs for the dry load that a cure ends with; none with --static-only."""
    from ..cure.judged import GPUS

    return () if static_only else tuple(chosen_gpus(words or [])) or GPUS


def refuse_stray_words(verb: str, words: Sequence[str]) -> None:
    """Refuse a second checkpoint or model, where words for `vllm serve` are meant.

    Raises:
        RecipeError: names it.
    """
    if words and not words[0].startswith("-"):
        raise RecipeError(verb, "takes one at a time", got=f"also {words[0]}", cure="Run it for each")


def chosen_vllm(*, any_vllm: bool) -> "VLLM":
    """The vLLM of this machine; one that keepmtp was not tested with is named on standard error.

    Raises:
        VLLMError: there is none, or it is another version and `any_vllm` is false.
    """
    from ..validate.facts.vllm_env import SUPPORTED, find_vllm, is_supported

    vllm = find_vllm(any_version=any_vllm)
    if not is_supported(vllm.version):
        says = f"vLLM {vllm.version}: keepmtp's rules were read from {SUPPORTED}. What is measured is this version's."
        sys.stderr.write(f"warning: {says}\n")
    return vllm
