"""What vLLM builds of a checkpoint's modules: `keepmtp check --modules`.

In: a `RuntimeView`. Out: a `BuiltGroup` for all modules that are built, stored and decided alike.

Easy to get wrong: modules of one kind need not have one fate, so there may be several groups of a
kind.
"""

from collections import defaultdict
from operator import attrgetter

from ...checkpoints.dialects.choose import UNQUANTIZED
from ...checkpoints.dialects.modelopt import ModelOpt
from ...checkpoints.dialects.runtime_view import Module, RuntimeView
from ...checkpoints.fact import Count, Fact
from ...recipes.errors import shortened


class BuiltGroup(Fact):
    """Modules that are built, stored and decided alike.

    Attributes:
        part: backbone or mtp.
        modules: what they are to the model, such as "attention".
        count: modules of vLLM; all experts of a layer are one.
        built: the form that vLLM builds.
        stored: the forms on disk.
        tensors: how many it is filled from.
        why: which entry of the config decides it.
    """

    part: str
    modules: str
    count: Count
    built: str
    stored: str
    tensors: Count
    why: str


def groups_of(runtime: RuntimeView) -> tuple[BuiltGroup, ...]:
    """Every group, in the order in which the files have them, the backbone's first."""
    alike: dict[tuple[str, ...], list[tuple[Module, str]]] = defaultdict(list)
    for module in runtime.modules:
        weights = [member.weight for member in module.members]
        stored = {weight.form.replace("plain", weight.weight.dtype) for weight in weights}
        built = module.resolution.built
        form = built.form.replace("int_packed", f"int{built.bits}")
        if module.resolution.error:
            form = "vLLM raises"
        reason, entry = _why(runtime, module)
        role = module.role.replace("_", " ")
        key = module.part, role, form, " + ".join(sorted(stored)), reason
        alike[key].append((module, entry))
    groups = list[BuiltGroup]()
    for (part, role, built, stored, reason), decided in alike.items():
        weights = [weight for module, _ in decided for _, weight in module.members]
        first, *others = dict.fromkeys(entry for _, entry in decided)
        why = f"{reason} {first}".rstrip()
        if others:
            why += f" and {len(others):,} more for the others"
        group = BuiltGroup(
            part=part,
            modules=role,
            count=len(decided),
            built=built,
            stored=stored,
            tensors=sum(len(weight.parts) for weight in weights),
            why=why,
        )
        groups.append(group)
    return tuple(sorted(groups, key=attrgetter("part")))


def _why(runtime: RuntimeView, module: Module) -> tuple[str, str]:
    """The reason, and the entry that decides it as config.json has it ("" for none)."""
    dialect = runtime.dialect_of(module.part)
    resolution = module.resolution
    if dialect is UNQUANTIZED:
        return "there is no quantization config", ""
    if not module.loads_quantized:
        return "vLLM builds it without the quantization config", ""
    for entry in dialect.entries:
        if resolution.entry in entry.read and resolution.entry and not resolution.error:
            written = shortened(entry.written)
            if entry.written != resolution.entry:
                written += f" (vLLM reads {shortened(resolution.entry)})"
            return f"{entry.where} has", written
    if isinstance(dialect, ModelOpt) and resolution.entry in dialect.quantized_layers:
        return "quantized_layers has", shortened(resolution.entry)
    unnamed = f"{shortened(dialect.name)} decides it, and no entry has its name"
    return shortened(resolution.error or resolution.entry) or unnamed, ""
