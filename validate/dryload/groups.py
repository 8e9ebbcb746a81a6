"""What vLLM builds for each group of modules, from which tensors and files, with which kernel, and which entry decides.

In: a `RuntimeView`, and a dry load if there is one. Out: `BuiltGroup`s, the backbone's first.

Easy to get wrong: modules of one kind need not have one fate. So a group is those that are built, stored and decided
alike. The kernel is known of kinds of layers; vLLM's questions to the quantization config say which modules are of one.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from ...checkpoints.fact import Count, Fact
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
    "glue": "glue",
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

_Key = tuple[str, str, str, str, str]  # part, role, built, stored, reason


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
    found: dict[_Key, list[Module]] = defaultdict(list)
    entries: dict[_Key, dict[str, None]] = defaultdict(dict)
    for module in runtime.modules:
        role = _ROLES.get(module.role, module.role)
        stored = " + ".join(sorted({_stored(member.weight) for member in module.members}))
        reason, entry = _why(runtime, module)
        key = (module.part, role, _built(module), stored, reason)
        found[key].append(module)
        entries[key].setdefault(entry)
    kernels = {"backbone": _kernels(account, "target"), "mtp": _kernels(account, "draft")}
    groups = [_group(key, modules, [*entries[key]], kernels[key[0]]) for key, modules in found.items()]
    return tuple(sorted(groups, key=lambda group: group.part != "backbone"))


def _group(key: _Key, modules: Sequence[Module], entries: Sequence[str], kernels: Mapping[str, str]) -> BuiltGroup:
    part, role, built, stored, reason = key
    more = "" if len(entries) == 1 else f" and {len(entries) - 1:,} more for the others"
    weights = [member.weight for module in modules for member in module.members]
    files = sorted({entry.file for weight in weights for entry in weight.parts.values()})
    return BuiltGroup(
        part=part,
        modules=role,
        count=len(modules),
        first=modules[0].name,
        built=built,
        stored=stored,
        tensors=sum(len(weight.parts) for weight in weights),
        files=len(files),
        first_file=files[0],
        why=f"{reason} {entries[0]}{more}".rstrip(),
        kernel=", ".join(dict.fromkeys(filter(None, (kernels.get(module.name) for module in modules)))),
    )


def _built(module: Module) -> str:
    if module.resolution.error:
        return "vLLM raises"
    built = module.resolution.built
    if built.form == "int_packed":
        return f"INT{built.bits}"
    return "plain" if built.form == "plain" else _FORMS.get(built.form, built.form)


def _stored(weight: StoredWeight) -> str:
    return weight.weight.dtype if weight.form == "plain" else _FORMS.get(weight.form, "packed integers")


def _why(runtime: RuntimeView, module: Module) -> tuple[str, str]:
    """The reason, and the entry that decides it ("" for none)."""
    dialect = runtime.draft_dialect if module.part == "mtp" else runtime.dialect
    resolution = module.resolution
    if not module.loads_quantized and not isinstance(dialect, Unquantized):
        return "vLLM builds it without the quantization config", ""
    if resolution.error:
        return shortened(resolution.error), ""
    if resolution.entry:
        return _entry(dialect, resolution.entry)
    is_plain, is_head = resolution.built.form == "plain", module.kind == "head"
    return _without_entry(dialect, is_plain=is_plain, is_head=is_head), ""


def _entry(dialect: Dialect, read: str) -> tuple[str, str]:
    """The list that has the entry, and the entry as config.json has it."""
    for entry in dialect.entries:
        if read in entry.read:
            renamed = "" if entry.written == read else f" (vLLM reads {shortened(read)})"
            return f"{entry.where} has", shortened(entry.written) + renamed
    return shortened(read), ""


def _without_entry(dialect: Dialect, *, is_plain: bool, is_head: bool) -> str:
    match dialect:
        case Unquantized():
            return "there is no quantization config"
        case CompressedTensors():
            return "no target of a config group matches its name or its class"
        case ModelOpt() if dialect.algorithm == "MIXED_PRECISION":
            return "quantized_layers does not have it"
        case ModelOpt():
            return f"quant_algo is {shortened(dialect.algorithm)}, and no entry excludes it"
        case Fp8() if is_head and is_plain:
            return f"{dialect.name} never quantizes a head"
        case Fp8():
            return f"quant_method is {dialect.name}, and no entry excepts it"
        case UnknownDialect():
            return f"keepmtp does not match names as {shortened(dialect.name)} does; --gpu lets vLLM say it"
        case _:
            return "the quantization config has no entry for it"


def _kernels(account: LoadAccount | None, role: Role) -> Mapping[str, str]:
    """vLLM's name of each module -> the kernel, else the method, of layers of its kind."""
    if account is None:
        return {}
    model, written = account.of(role)
    of_kind: dict[tuple[str, str], str] = {}
    for use in model.kernels:
        refused = " (refused)" if use.outcome.startswith("refused") else ""
        of_kind.setdefault((use.layer, use.method), (use.kernel.partition(" ")[0] or _plain(use.method)) + refused)
    return {
        question.prefix: of_kind[kind]
        for question in written.asked
        if (kind := (question.layer, question.scheme or question.method)) in of_kind
    }


def _plain(method: str) -> str:
    return "PyTorch" if method.startswith("Unquantized") else method


def attention_of(account: LoadAccount, role: Role) -> str:
    """The backends of attention, with the number format of their KV cache."""
    model, _ = account.of(role)
    found: Iterable[str] = (use.kernel for use in model.kernels if "ttention" in use.layer and use.kernel)
    return ", ".join(dict.fromkeys(found))
