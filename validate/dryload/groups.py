"""What vLLM builds for each group of modules, from which tensors and files, with which kernel, and
which entry decides.

In: a `RuntimeView`, and a dry load if there is one. Out: `BuiltGroup`s, the backbone's first.

Easy to get wrong: modules of one kind need not have one fate. So a group is those that are built,
stored and decided alike. The kernel is known of kinds of layers; vLLM's questions to the
quantization config say which modules are of one.
"""

from collections import defaultdict
from collections.abc import Mapping

from ...checkpoints.fact import Count, Fact
from ...checkpoints.safetensors_file import Entry
from ...checkpoints.stored import StoredWeight
from ...recipes.errors import shortened
from ..check.dialects.choose import Unquantized
from ..check.dialects.compressed_tensors import CompressedTensors
from ..check.dialects.fp8 import Fp8
from ..check.dialects.modelopt import ModelOpt
from ..check.runtime_view import Module, RuntimeView
from ..check.vllm_module import Dialect, UnknownDialect
from ..facts.dry_load import LoadAccount, Role

_ROLES: Mapping[str, str] = {
    "dense_mlp": "dense MLP",
    "experts": "routed experts",
    "shared_experts": "shared experts",
    "linear_attention": "linear attention",
}
_FORMS: Mapping[str, str] = {
    "nvfp4": "NVFP4",
    "nvfp4_modelopt": "NVFP4",
    "mxfp4": "MXFP4",
    "mxfp8": "MXFP8",
    "fp8_tensor": "FP8, a scale",
    "fp8_channel": "FP8 by channel",
    "fp8_block": "FP8 in blocks",
    "int8": "INT8",
    "unknown": "not known",
}


class BuiltGroup(Fact):
    """Modules that are built, stored and decided alike.

    Attributes:
        part: backbone or mtp.
        modules: what they are to the model, such as "attention".
        count: modules of vLLM; all experts of a layer are one.
        first: vLLM's name of the first.
        built: what vLLM builds.
        stored: the forms on disk.
        tensors, files: how many of each it is filled from.
        first_file: one of the files.
        why: which entry of the config decides it.
        kernel: what vLLM runs it with; "" where no dry load said it.
    """

    part: str
    modules: str
    count: Count
    first: str
    built: str
    stored: str
    tensors: Count
    files: Count
    first_file: str
    why: str
    kernel: str = ""


def groups_of(runtime: RuntimeView, account: LoadAccount | None = None) -> tuple[BuiltGroup, ...]:
    """Every group, in the order in which the files have them, the backbone's first."""
    found: dict[tuple[str, ...], list[tuple[Module, str]]] = defaultdict(list)
    for module in runtime.modules:
        stored = " + ".join(sorted({_stored(member.weight) for member in module.members}))
        reason, entry = _why(runtime, module)
        found[module.part, module.role, _built(module), stored, reason].append((module, entry))
    kernels = {"backbone": _kernels(account, "target"), "mtp": _kernels(account, "draft")}
    groups: list[BuiltGroup] = []
    for (part, role, built, stored, reason), decided in found.items():
        entries, names = dict[str, None](), dict[str, None]()
        tensors: list[Entry] = []
        for module, entry in decided:
            entries[entry] = names[kernels[part].get(module.name, "")] = None
            for member in module.members:
                tensors += member.weight.parts.values()
        first, *others = entries
        more = f" and {len(others):,} more for the others" if others else ""
        files = sorted({tensor.file for tensor in tensors})
        group = BuiltGroup(
            part=part,
            modules=_ROLES.get(role, role),
            count=len(decided),
            first=decided[0][0].name,
            built=built,
            stored=stored,
            tensors=len(tensors),
            files=len(files),
            first_file=files[0],
            why=f"{reason} {first}{more}".rstrip(),
            kernel=", ".join(filter(None, names)),
        )
        groups.append(group)
    return tuple(sorted(groups, key=lambda group: group.part != "backbone"))


def _built(module: Module) -> str:
    built = module.resolution.built
    if module.resolution.error:
        return "vLLM raises"
    return f"INT{built.bits}" if built.form == "int_packed" else _FORMS.get(built.form, built.form)


def _stored(weight: StoredWeight) -> str:
    return (
        weight.weight.dtype
        if weight.form == "plain"
        else _FORMS.get(weight.form, "packed integers")
    )


def _why(runtime: RuntimeView, module: Module) -> tuple[str, str]:
    """The reason, and the entry that decides it as config.json has it ("" for none)."""
    dialect = runtime.draft_dialect if module.part == "mtp" else runtime.dialect
    resolution = module.resolution
    if not module.loads_quantized and not isinstance(dialect, Unquantized):
        return "vLLM builds it without the quantization config", ""
    for entry in dialect.entries if resolution.entry and not resolution.error else ():
        if resolution.entry in entry.read:
            is_renamed = entry.written != resolution.entry
            renamed = f" (vLLM reads {shortened(resolution.entry)})" if is_renamed else ""
            return f"{entry.where} has", shortened(entry.written) + renamed
    if decided := resolution.error or resolution.entry:
        return shortened(decided), ""
    return _without_entry(dialect, module), ""


def _without_entry(dialect: Dialect, module: Module) -> str:
    is_plain_head = module.kind == "head" and module.resolution.built.form == "plain"
    match dialect:
        case Unquantized():
            return "there is no quantization config"
        case CompressedTensors():
            return "no target of a config group matches its name or its class"
        case ModelOpt() if dialect.algorithm == "MIXED_PRECISION":
            return "quantized_layers does not have it"
        case ModelOpt():
            return f"quant_algo is {shortened(dialect.algorithm)}, and no entry excludes it"
        case Fp8() if is_plain_head:
            return f"{dialect.name} never quantizes a head"
        case Fp8():
            return f"quant_method is {dialect.name}, and no entry excepts it"
        case UnknownDialect():
            return (
                f"keepmtp does not match names as {shortened(dialect.name)} does; --gpu lets "
                "vLLM say it"
            )
        case _:
            return "the quantization config has no entry for it"


def _kernels(account: LoadAccount | None, role: Role) -> Mapping[str, str]:
    """vLLM's name of each module -> the kernel, else the method, of layers of its kind."""
    if account is None:
        return {}
    model, written = account.of(role)
    of_kind: dict[tuple[str, str], str] = {}
    for use in model.kernels:
        method = "PyTorch" if use.method.startswith("Unquantized") else use.method
        refused = " (refused)" if use.outcome.startswith("refused") else ""
        of_kind.setdefault(
            (use.layer, use.method), (use.kernel.partition(" ")[0] or method) + refused
        )
    return {
        asked.prefix: of_kind.get((asked.layer, asked.scheme or asked.method), "")
        for asked in written.asked
    }


def attention_of(account: LoadAccount, role: Role) -> str:
    """The backends of attention, with the number format of their KV cache."""
    kernels = account.of(role)[0].kernels
    return ", ".join(
        dict.fromkeys(use.kernel for use in kernels if "ttention" in use.layer and use.kernel)
    )
