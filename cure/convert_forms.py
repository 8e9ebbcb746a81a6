"""Which scheme each weight of a finished checkpoint has, by its quantization config and its
tensors.

In: a checkpoint as vLLM sees it, in compressed-tensors' or modelopt's dialect. Out: every matrix
with its scheme, or a refusal that names the tensor the other dialect has no word for.

Easy to get wrong: the tensors alone do not say it. FP8 with a scale a row is FP8_DYNAMIC only if
the config quantizes activations too; so the group that vLLM takes is compared with the scheme,
argument by argument.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..checkpoints.safetensors_file import Entry
from ..recipes.conventions import (
    ALGORITHMS,
    CACHE,
    CACHE_LEAVES,
    FORMATS,
    NOT_FOR_EXPERTS,
    Format,
    cache_scale_in,
)
from ..recipes.errors import CheckpointError
from ..recipes.family import HFName, Part
from ..recipes.family_view import Place
from ..recipes.renamer import renamer
from ..recipes.schemes import SCHEMES
from ..validate.check.dialects.choose import quantization_of
from ..validate.check.dialects.given import (
    CompressedTensorsGiven,
    GivenArguments,
    GivenGroup,
    read_given,
)
from ..validate.check.runtime_view import RuntimeView
from ..validate.check.vllm_module import VLLMModule

# compressed-tensors' QuantizationArgs: what an argument is that is not given.
_DEFAULTS: Mapping[str, Any] = {
    "num_bits": 8,
    "type": "int",
    "symmetric": True,
    "strategy": None,
    "dynamic": False,
    "group_size": None,
    "block_structure": None,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredMatrix:
    """One matrix on disk: a `config.modules.Matrix`.

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


def dialect_of(runtime: RuntimeView) -> Format:
    """The dialect that a checkpoint is in.

    Raises:
        CheckpointError: another one, or none.
    """
    raw = quantization_of(runtime.source.config) or {}
    if extra := next(
        (key for key in ("transform_config", "sparsity_config") if raw.get(key)), None
    ):
        where, rule = (
            f"{runtime.source.where}/config.json: {extra}",
            "must be empty: modelopt has no word for it",
        )
        raise CheckpointError(
            where, rule, got="an entry", cure="Keep the checkpoint in compressed-tensors' dialect"
        )
    for name in FORMATS:
        if runtime.dialect.name == name:
            return name
    rule = f"only {' and '.join(FORMATS)} are converted into each other"
    raise CheckpointError(
        runtime.source.where, rule, got=runtime.dialect.name, cure="Quantize the original release"
    )


def caches_in(runtime: RuntimeView) -> list[StoredMatrix]:
    """Attention modules with scales of an FP8 cache, under the names of this dialect.

    vLLM's own names (`self_attn.attn.k_scale`) are the same in both dialects, and their tensors
    stay as they are.
    """
    found: dict[HFName, dict[str, Entry]] = {}
    for entry in runtime.others:
        name = HFName(cache_scale_in("compressed-tensors", entry.name))
        module, _, leaf = name.rpartition(".")
        if leaf in CACHE_LEAVES and not module.endswith(".attn"):
            found.setdefault(HFName(module), {})[leaf] = entry
    return [
        StoredMatrix(module=module, place=None, scheme=CACHE, parts=parts)
        for module, parts in found.items()
    ]


def matrices_in(runtime: RuntimeView, to: Format) -> list[StoredMatrix]:
    """Every matrix of the language model and its MTP block, with its scheme; "" for plain ones.

    Raises:
        CheckpointError: a quantized weight in a form that only one of the two dialects has.
    """
    opaque = tuple(disk for disk, _, _ in runtime.view.layout.opaque)
    schemes = dict(_schemes(runtime))
    found: list[StoredMatrix] = []
    for module, weight in runtime.weights.items():
        if weight.form != "plain" and module not in schemes:
            raise _wordless(
                runtime, weight.weight.name, "a quantized module that vLLM has no entry for"
            )
        scheme, place = schemes.get(module, ""), runtime.placed.get(module)
        matrix = StoredMatrix(module=module, place=place, scheme=scheme, parts=weight.parts)
        if len(weight.shape) < 2 or module.startswith(opaque or "\0"):
            continue
        if to == "modelopt" and matrix.is_of_experts and scheme in NOT_FOR_EXPERTS:
            raise _wordless(
                runtime, weight.weight.name, f"{scheme} of routed experts, which modelopt lacks"
            )
        found.append(matrix)
    stacks = [
        StoredMatrix(module=entry.name, place=runtime.placed.get(entry.name))
        for entry in runtime.others
        if len(entry.shape) >= 2
    ]
    return [*found, *(stack for stack in stacks if stack.is_of_experts)]


def _schemes(runtime: RuntimeView) -> Iterator[tuple[HFName, str]]:
    """The scheme of each quantized module on disk."""
    groups = _groups(runtime) if dialect_of(runtime) == "compressed-tensors" else None
    for module in runtime.modules:
        for member in module.members:
            if member.weight.form != "plain":
                built, entry = module.resolution.built, module.resolution.entry
                scheme = (
                    _of_algorithm(built)
                    if groups is None
                    else _of_group(groups.get((module.part, entry)))
                )
                if not scheme:
                    by = f"entry {entry}" if entry else "the config's one algorithm"
                    raise _wordless(runtime, member.weight.weight.name, f"{built.form} by {by}")
                yield member.weight.module, scheme


def _groups(runtime: RuntimeView) -> dict[tuple[Part, str], GivenGroup]:
    """compressed-tensors' groups by the targets that the target's class, and the draft's, reads."""
    raw = quantization_of(runtime.source.config) or {}
    parts: tuple[Part, ...] = ("backbone", "mtp")
    return {
        (part, renamer(runtime.source.config, part).path(target)): group
        for group in (read_given(CompressedTensorsGiven, raw).config_groups or {}).values()
        for target in group.targets or ()
        for part in parts
    }


def _of_group(group: GivenGroup | None) -> str:
    """The scheme whose arguments a group has; "" if none that modelopt has a word for."""
    if group is None:
        return ""
    given = _complete(group.weights), _complete(group.input_activations)
    for name in ALGORITHMS:
        scheme = SCHEMES[name]
        wanted = (
            GivenArguments.model_validate(each or {}) for each in (scheme.weights, scheme.inputs)
        )
        if given == tuple(map(_complete, wanted)):
            return name
    return ""


def _complete(given: GivenArguments | None) -> dict[str, Any]:
    """All arguments; none where nothing is quantized."""
    if given is None or not given.model_fields_set:
        return {}
    return {**_DEFAULTS, **given.model_dump(include={*_DEFAULTS}, exclude_none=True)}


def _of_algorithm(built: VLLMModule) -> str:
    """The scheme of what vLLM builds for a modelopt module; "" if compressed-tensors has none like
    it here.
    """
    if built.form == "nvfp4_modelopt" and built.group_size == 16:
        return "NVFP4" if "input_scale" in built.leaves else "NVFP4A16"
    if built.form == "fp8_block":
        return "FP8_BLOCK" if built.block == (128, 128) else ""
    return {"fp8_tensor": "FP8", "fp8_channel": "FP8_DYNAMIC"}.get(built.form, "")


def _wordless(runtime: RuntimeView, name: HFName, got: str) -> CheckpointError:
    rule = f"both dialects must have a word for the form of a tensor: {', '.join(ALGORITHMS)}"
    return CheckpointError(
        f"{runtime.source.where}: {name}", rule, got=got, cure="Quantize the original release anew"
    )
