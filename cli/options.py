"""The arguments and options that several verbs have: those that stand alone, and groups of them.

In: what typer read of a command line. Out: values, and refusals of what cannot be meant.

A verb that has a parameter of a group's type has all its options (`spread` in main.py).
"""

import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..recipes.errors import RecipeError, did_you_mean
from ..recipes.frozen import frozen
from ..validate.facts.vllm_env import TIMEOUT_SECONDS

if TYPE_CHECKING:
    from ..quantize.plan.plan import Plan
    from ..validate.facts.dry_load import GPU
    from ..validate.facts.vllm_env import VLLM

# vLLM's kernels go by the first name; people type the others, with NVIDIA, RTX and signs.
_NAMES_OF = {
    "sm80": "a100 a800 a30 ampere",
    "sm86": "a10 a10g a40 a6000 3080 3090",
    "sm89": "l40s l20 l4 4080 4090 6000ada ada",
    "sm90": "h100 h800 h200 h20 gh200 hopper",
    "sm100": "b200 gb200 b300 gb300 blackwell sm103",
    "sm120": "5080 5090 pro6000 gb10 sm121",
}

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and stop.")]
ModelArgument = Annotated[
    str, typer.Argument(help="Model (see `keepmtp ls`), recipe file, or checkpoint.")
]
PathArgument = Annotated[str, typer.Argument(help="A checkpoint: a folder or a Hub id.")]
PathsArgument = Annotated[
    list[str], typer.Argument(help="Checkpoints: folders or Hub ids, anyone's.")
]
SourceOption = Annotated[str | None, typer.Option(help="The release: a folder or a Hub id.")]
MtpSourceOption = Annotated[str | None, typer.Option(help="Folder or Hub id of the MTP block.")]
GpusOption = Annotated[
    list[str] | None, typer.Option("--gpu", help="Let vLLM load it, on this pretended GPU.")
]
TpsOption = Annotated[
    list[int] | None, typer.Option("--tp", min=1, help="Tensor-parallel size; may be repeated.")
]
VLLMsOption = Annotated[
    list[str] | None,
    typer.Option("--vllm", metavar="VERSIONS", help="Versions of vLLM that load it."),
]
DraftOption = Annotated[str, typer.Option(help="The draft's own checkpoint, where it has one.")]
OriginalOption = Annotated[
    str | None, typer.Option("--source", help="What it was made from, or `none`.")
]
PromptsOption = Annotated[Path | None, typer.Option(help="Your own prompts, in a file.")]
MaxTokensOption = Annotated[int, typer.Option(min=1, help="Tokens of an answer, at most.")]
VLLMWords = Annotated[
    list[str] | None, typer.Argument(metavar="-- VLLM_OPTIONS", help="Words for `vllm serve`.")
]
K = ("-k", "--num-speculative-tokens")


@frozen
class ModelOptions:
    """A model, and what a person decides about it."""

    model: ModelArgument
    source: SourceOption = None
    scheme: Annotated[
        str | None, typer.Option(help="Another variant, or a scheme for all groups.")
    ] = None
    mtp: Annotated[
        str | None, typer.Option(help="`source`, `bf16`, a scheme, `tuned`, or `auto`.")
    ] = None
    calibration: Annotated[
        str | None, typer.Option(help="A named block of recipes/calibrations.yaml.")
    ] = None
    mtp_source: MtpSourceOption = None
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="GROUP=VALUE", help="Change this group alone; repeatable."),
    ] = None
    draft_for: Annotated[
        str | None, typer.Option(help="Write the block alone, for this finished checkpoint.")
    ] = None
    changed_only: Annotated[
        bool, typer.Option("--changed-only", help="With --set, write only files that change.")
    ] = False
    requantize: Annotated[
        bool, typer.Option("--requantize", help="Round quantized weights a second time.")
    ] = False
    trust_remote_code: Annotated[
        bool,
        typer.Option("--trust-remote-code", help="You have read the checkpoint's own Python."),
    ] = False

    def plan(self) -> "Plan":
        """The plan for them."""
        from .. import api

        return api.plan(**asdict(self))


@frozen
class ServeOptions:
    """A checkpoint that is measured with servers, and where the results go."""

    path: PathArgument
    vllm_words: VLLMWords = None
    timeout: Annotated[
        float, typer.Option(min=1, help="Seconds that a server may take to start.")
    ] = TIMEOUT_SECONDS
    out: Annotated[Path | None, typer.Option(help="Folder for these results alone.")] = None
    as_json: JsonOption = False


def chosen_gpus(words: Sequence[str]) -> "list[GPU]":
    """The GPUs to pretend, in keepmtp's order.

    Raises:
        RecipeError: a name that means none of them; the cure has the nearest.
    """
    from ..validate.facts.dry_load import GPUS

    known = {name: sm for sm, names in _NAMES_OF.items() for name in names.split()}
    meant = set[str]()
    for word in re.findall("[^,]+", ",".join(words)):
        typed = re.sub(r"nvidia|geforce|rtx|sxm\d?|pcie|nvl\d*|\b\d+gb|[\s_-]", "", word.lower())
        name = known.get(typed, typed)
        meant.add(name)
        if name not in GPUS:
            # V100 is no slip for H100: a card's first letter is its generation.
            names = [each for each in (*GPUS, *known) if each[0] == name[:1]]
            cure = "Name an NVIDIA card from Ampere on, such as H100, or one of these"
            cure = did_you_mean(name, names, otherwise=cure)
            raise RecipeError("--gpu", f"must be one of {', '.join(GPUS)}", got=word, cure=cure)
    return [gpu for gpu in GPUS if gpu in meant]


def refuse_stray_words(verb: str, words: Sequence[str]) -> None:
    """Refuse a second checkpoint or model, where words for `vllm serve` are meant.

    Raises:
        RecipeError: names it.
    """
    if words and not words[0].startswith("-"):
        raise RecipeError(
            verb, "takes one at a time", got=f"also {words[0]}", cure="Run it for each"
        )


def chosen_vllm() -> "VLLM":
    """The vLLM of this machine; one whose source no rule was read from is named on standard error.

    Raises:
        VLLMError: there is none.
    """
    from ..recipes.runtimes.vllm import KNOWN, is_known
    from ..validate.facts.vllm_env import find_vllm

    vllm = find_vllm()
    if not is_known(vllm.version):
        says = (
            f"vLLM {vllm.version}: keepmtp's rules were read from {KNOWN[0]} to {KNOWN[-1]}. What "
            "is measured is this version's."
        )
        sys.stderr.write(f"warning: {says}\n")
    return vllm
