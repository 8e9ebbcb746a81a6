"""`keepmtp convert`: a finished checkpoint in the other dialect, compressed-tensors' or modelopt's.

In: a folder and a dialect. Out: a `Conversion`, which says all that will be written before a byte
is; then a new folder. Packed bytes are copied from file to file under their new names; scales of a
module are re-expressed; shards without a quantized weight are hard links.

Easy to get wrong: which scheme a weight has. FP8 with a scale a row is FP8_DYNAMIC only if the
config quantizes activations too; so the dialect compares the group that vLLM takes with the scheme,
argument by argument. And the way back: 1 / (1 / x) is not x for one F32 in seven, but its
neighbour.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from ..checkpoints.companions import HF_QUANT_CONFIG
from ..checkpoints.dialects.runtime_view import RuntimeView
from ..checkpoints.dialects.written import config_files, quantization_config
from ..checkpoints.safetensors_file import Entry
from ..checkpoints.values import TORCH_DTYPES, changed, read_tensor
from ..recipes.conventions import (
    ALGORITHMS,
    CACHE,
    CACHE_LEAVES,
    FORMATS,
    NOT_FOR_EXPERTS,
    Format,
    cache_scale_in,
    in_compressed_tensors,
    in_modelopt,
)
from ..recipes.errors import CheckpointError, RecipeError
from ..recipes.family import HFName
from ..recipes.family_view import Place
from ..recipes.frozen import Advance, frozen, nowhere
from ..recipes.schemes import num_bytes
from ..validate.check.check import examine
from .proposal import CONFIG, Proposal
from .rewritten import Rewritten, rewrite

_ANEW = "Quantize the original release anew"


@frozen
class StoredMatrix:
    """One matrix on disk: a `dialects.modules.Matrix`.

    Attributes:
        module: its module's name; of a stack of experts, which has none, its own.
        place: what it is; None where the family does not know it.
        scheme: "" for plain ones.
        parts: the tensors that it consists of, by leaf; none of a stack.
    """

    module: HFName
    place: Place | None
    scheme: str = ""
    parts: Mapping[str, Entry] = field(default_factory=dict)

    @property
    def is_of_experts(self) -> bool:
        """Whether it is a projection of a routed expert."""
        return self.place is not None and self.place.role == "experts"


@dataclass(frozen=True)
class Conversion:
    """What will be written.

    Attributes:
        proposal: the checkpoint as it will be; `made` has the tensors with other bytes.
        first: its dialect.
        to: the new one.
    """

    proposal: Proposal
    first: Format
    to: Format

    @property
    def num_changed(self) -> int:
        """How many tensors get another name or form, or other bytes."""
        return sum(bool(edit.says) for edit in self.proposal.edits)


def plan_conversion(where: str, to: Format) -> Conversion:
    """Decide everything about a conversion; only scales that are re-expressed are read.

    Args:
        where: a checkpoint's folder.
        to: the dialect that it will have.

    Raises:
        RecipeError: a Hub repository, or the dialect that the checkpoint has already.
        CheckpointError: it does not pass its own check, it is in another dialect, or a tensor has a
            form or a value that the other dialect has no word for.
    """
    checked = examine(where)
    source = checked.readable()
    runtime = checked.runtime
    findings = checked.data.findings
    if runtime is None or (findings and findings[0].severity == "error"):  # errors come first
        found = findings[0]
        raise CheckpointError(
            f"{where}: {found.where}",
            "must pass its own check before it is converted",
            got=found.says,
            cure=found.cure,
        )
    if source.folder is None:
        raise RecipeError(
            where,
            "what is converted must be a folder here",
            got="a Hub repository",
            cure="Download it: `hf download` puts a repository into a folder",
        )
    first = _dialect_of(runtime)
    why = f"so {to} has it"
    if first == to:
        raise RecipeError(
            where,
            "a checkpoint is converted into the other dialect",
            got=f"one in {to} already",
            cure="There is nothing to do",
        )
    proposal = Proposal(source)
    matrices = _matrices_in(runtime, to)
    # Attention modules with scales of an FP8 cache, under the names of this dialect. vLLM's own
    # names (`self_attn.attn.k_scale`) are the same in both, and their tensors stay as they are.
    caches = defaultdict[HFName, dict[str, Entry]](dict)
    for entry in runtime.others:
        module, _, leaf = cache_scale_in("compressed-tensors", entry.name).rpartition(".")
        if leaf in CACHE_LEAVES and not module.endswith(".attn"):
            caches[HFName(module)][leaf] = entry
    cached = [
        StoredMatrix(module=module, place=None, scheme=CACHE, parts=parts)
        for module, parts in caches.items()
    ]
    for matrix in (*matrices, *cached):
        if not matrix.scheme:
            continue
        for entry in matrix.parts.values():
            new, data = _turned(runtime, matrix, entry, to)
            if new == entry and data is None:
                continue
            if not proposal.retensor(entry, new, why):
                raise CheckpointError(
                    f"{where}: {entry.name}",
                    "no tensor must have the name that another one gets",
                    got=new.name,
                    cure="Take one out",
                )
            if data is not None:
                proposal.made[new.name] = data
    cache = runtime.kv_cache_scheme
    made = quantization_config(runtime.view, matrices, format=to, cache=cache).value
    files = config_files(source.config, made, runtime.view)
    for name in (CONFIG, HF_QUANT_CONFIG):
        proposal.set(name, (), files.get(name), why)
    return Conversion(proposal, first, to)


def convert(planned: Conversion, out: Path, *, progress: Advance = nowhere) -> Rewritten:
    """Write the new folder.

    Args:
        planned: what is written.
        out: where; nothing may be there.
        progress: called with numbers of bytes of new shards.

    Raises:
        RecipeError, CheckpointError: see `rewritten.rewrite`.
    """
    return rewrite(planned.proposal, out, made_by=f"convert --to {planned.to}", written=progress)


def _turned(
    runtime: RuntimeView, matrix: StoredMatrix, entry: Entry, to: Format
) -> tuple[Entry, bytes | None]:
    """A tensor of a packed module in the other dialect, and its bytes where they are others: in the
    wished dtype, in F32 where that cannot hold the values.

    Raises:
        CheckpointError: it is re-expressed, and not positive and finite.
    """
    leaf = entry.name.rpartition(".")[2]
    form = (entry.dtype, entry.shape)
    if to == "modelopt":
        other = in_modelopt(matrix.scheme, leaf, *form, of_experts=matrix.is_of_experts)
    else:
        other = in_compressed_tensors(matrix.scheme, leaf, *form)
    name = HFName(f"{matrix.module}.{other.leaf}")
    dtype = other.dtype
    new = replace(entry, name=name, dtype=dtype, shape=other.shape)
    if other.change == "none":
        return new, None
    value = read_tensor(runtime.source, entry)
    if not bool(((value.float() > 0) & value.float().isfinite()).all()):
        raise CheckpointError(
            f"{runtime.source.where}: {entry.name}",
            "a scale that is re-expressed must be positive and finite",
            got=f"{value.flatten().tolist()[:4]}",
            cure="See `keepmtp check --values`",
        )
    made = changed(value, other.change, TORCH_DTYPES[dtype])
    if other.change == "dtype" and not torch.equal(made.float(), value.float()):
        dtype = "F32"
        made = value.float()
    new = replace(new, dtype=dtype, num_bytes=num_bytes(dtype, other.shape))
    return new, made.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _dialect_of(runtime: RuntimeView) -> Format:
    """The dialect that a checkpoint is in.

    Raises:
        CheckpointError: another one, or none.
    """
    runtime.refuse_more()
    for name in FORMATS:
        if runtime.dialect.name == name:
            return name
    raise CheckpointError(
        runtime.source.where,
        f"only {' and '.join(FORMATS)} are converted into each other",
        got=runtime.dialect.name,
        cure=_ANEW,
    )


def _matrices_in(runtime: RuntimeView, to: Format) -> list[StoredMatrix]:
    """Every matrix of the language model and its MTP block, with its scheme; "" for plain ones.

    Raises:
        CheckpointError: a quantized weight in a form that only one of the two dialects has.
    """
    opaque = tuple(disk for disk, _, _ in runtime.view.layout.opaque)
    _refuse_wordless(runtime)
    schemes = runtime.schemes
    found: list[StoredMatrix] = []
    for module, weight in runtime.weights.items():
        if weight.form != "plain" and module not in schemes:
            raise _wordless(runtime, weight.weight.name, "a module that vLLM has no entry for")
        scheme = schemes.get(module, "")
        matrix = StoredMatrix(
            module=module, place=runtime.placed.get(module), scheme=scheme, parts=weight.parts
        )
        if len(weight.shape) < 2 or module.startswith(opaque or "\0"):
            continue
        if to == "modelopt" and matrix.is_of_experts and scheme in NOT_FOR_EXPERTS:
            got = f"{scheme} of routed experts, which modelopt lacks"
            raise _wordless(runtime, weight.weight.name, got)
        found.append(matrix)
    for entry in runtime.others:
        stack = StoredMatrix(module=entry.name, place=runtime.placed.get(entry.name))
        if len(entry.shape) >= 2 and stack.is_of_experts:
            found.append(stack)
    return found


def _refuse_wordless(runtime: RuntimeView) -> None:
    """Refuse a quantized module that only one of the two dialects has a word for."""
    for module in runtime.modules:
        for member in module.members:
            name = member.weight.module
            if name in runtime.schemes and runtime.schemes[name] not in ALGORITHMS:
                by = "the config's one algorithm"
                if module.resolution.entry:
                    by = f"entry {module.resolution.entry}"
                got = f"{module.resolution.built.form} by {by}"
                raise _wordless(runtime, member.weight.weight.name, got)


def _wordless(runtime: RuntimeView, name: HFName, got: str) -> CheckpointError:
    return CheckpointError(
        f"{runtime.source.where}: {name}",
        f"both dialects must have a word for the form of a tensor: {', '.join(ALGORITHMS)}",
        got=got,
        cure=_ANEW,
    )
