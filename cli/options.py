"""The arguments and options that several verbs have: those that stand alone, and groups of them.

In: what typer read of a command line. Out: values, and refusals of what cannot be meant.

A verb that has a parameter of a group's type has all its options (`flat` in main.py). What a
docstring says of an option is its help; this one's, where the verb's and the group's say nothing.

Attributes:
    model: A model's name, a recipe's full name or a recipe file (see `keepmtp ls`); or a
        checkpoint: a folder, a Hub id, or the address of its page.
    mtp_source: Folder or Hub id of the MTP block, for a release that has none; only its MTP tensors
        are read; default: the recipe's.
    tps: Tensor-parallel size; may be repeated.
    as_json: Print JSON for machines instead of words and tables.
    dry_run: Say what would be done, and stop.
    source: What it was made from, folder or Hub id; default: what its keepmtp.json names, if that
        is a folder here. `none`: nothing is compared.
"""

import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..recipes.errors import RecipeError, did_you_mean
from ..recipes.frozen import frozen, without
from ..validate.facts.vllm_env import TIMEOUT_SECONDS

if TYPE_CHECKING:
    from ..quantize.plan.plan import Plan
    from ..recipes.schema import Recipe
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

AtLeastOne = Annotated[int, typer.Option(min=1)]
AtLeastOneOrNone = Annotated[int | None, typer.Option(min=1)]
K = ("-k", "--num-speculative-tokens")
KOption = Annotated[int | None, typer.Option(*K, min=1)]
GpusOption = Annotated[list[str] | None, typer.Option("--gpu")]
TpsOption = Annotated[list[int] | None, typer.Option("--tp", min=1)]
JsonOption = Annotated[bool, typer.Option("--json")]
DryRunOption = Annotated[bool, typer.Option("--dry-run")]
SetOption = Annotated[list[str] | None, typer.Option("--set", metavar="GROUP=VALUE")]
VLLMsOption = Annotated[list[str] | None, typer.Option("--vllm", metavar="VERSIONS")]
OriginalOption = Annotated[str | None, typer.Option("--source")]


@frozen
class ModelOptions:
    """A model, and what a person decides about it.

    Attributes:
        source: Folder or Hub id of the released checkpoint; default: the recipe's.
        scheme: Another variant of the model, or a scheme for every quantized group. Needed where
            MODEL is a checkpoint.
        mtp: MTP block: `source`, `bf16`, a scheme, `tuned` (trained on the quantized backbone), or
            `auto`: the smallest that keeps enough acceptance, measured during the run; default:
            the recipe's.
        calibration: A named block of recipes/calibrations.yaml, for schemes that need batches;
            default: the recipe's, else ultrachat-256x2048.
        changes: Of a checkpoint as MODEL, change this group alone; may be repeated. GROUP is a
            module group, `mtp`, `kv_cache` or `format`. `from:DONOR` takes the group as another
            build of the model has it, a folder or a Hub id. All else stays as it is, byte for
            byte.
        draft_for: Write the MTP block alone, as a draft of its own for this finished checkpoint: a
            folder or a Hub id. Its config decides in which form vLLM builds the draft.
        changed_only: Of a Hub id as MODEL with --set, read and write only the files that change,
            to propose them to its owner. No server loads them alone.
        requantize: Round weights that a tool has quantized already a second time.
        trust_remote_code: You have read the checkpoint's own Python: a recipe with
            `model_code: checkpoint` may run it, and the output gets its .py files.
    """

    model: str
    source: str | None = None
    scheme: str | None = None
    mtp: str | None = None
    calibration: str | None = None
    mtp_source: str | None = None
    changes: SetOption = None
    draft_for: str | None = None
    changed_only: bool = False
    requantize: bool = False
    trust_remote_code: bool = False

    def recipe(self) -> "Recipe":
        """The recipe for them; of a checkpoint as MODEL, its headers are read."""
        from .. import pipeline

        return pipeline.recipe_for(**without(asdict(self), "trust_remote_code", "changed_only"))

    def plan(self) -> "Plan":
        """The plan for them."""
        from .. import api

        return api.plan(**asdict(self))


@frozen
class ServeOptions:
    """A checkpoint that is measured with servers, and where the results go.

    Attributes:
        path: Checkpoint to measure: a folder or a Hub id.
        timeout: Seconds a server may take to be healthy.
        out: Folder for these results alone; default: NAME.report next to the checkpoint, with all
            its results.
    """

    path: str
    timeout: Annotated[float, typer.Option(min=1)] = TIMEOUT_SECONDS
    out: Path | None = None
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
