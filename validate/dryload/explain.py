"""`keepmtp explain`: what vLLM builds of a checkpoint, and what a serve log says of its failure.

In: what the check found of a checkpoint, and a `Log`; one of them may be missing. Out: an
`Explanation`.

Easy to get wrong: modules of one kind need not have one fate. So a group is those that are built,
stored and decided alike. And a log may be of another checkpoint, of another version, or of a
failure that nobody knows. So each answer says what of it the check confirms here, and an exception
that no table knows is called unknown.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping

from ...checkpoints.fact import Count, Fact
from ...checkpoints.stored import StoredWeight
from ...recipes.errors import shortened
from ..check.check import Checked
from ..check.dialects.choose import Unquantized
from ..check.dialects.compressed_tensors import CompressedTensors
from ..check.dialects.fp8 import Fp8
from ..check.dialects.modelopt import ModelOpt
from ..check.runtime_view import Module, RuntimeView
from ..check.vllm_module import Dialect, UnknownDialect
from ..facts.dry_load import LoadAccount
from ..facts.findings import Finding
from .failures import IN_LOGS, KnownFailure, known_failure
from .log import Log
from .trace import on_disk

_MOST_UNKNOWN = 5
# What the engine and the server say after a worker has failed.
_FOLLOW_UPS = (
    "EngineDeadError",
    "EngineGenerateError",
    "RuntimeError: Engine core initialization failed",
)
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


class Recognized(Fact):
    """A known failure in a log.

    Attributes:
        failure: what is known of it.
        line: the line of the log.
        names: the name in that line; "" for none.
        on_disk: the tensor of this checkpoint that the name means; "" where it is not known.
        confirmed: what the check finds of this kind in this checkpoint, each as "where: what".
        command: words of keepmtp's command that cures it or looks closer; () for none.
    """

    failure: KnownFailure
    line: str
    names: str = ""
    on_disk: str = ""
    confirmed: tuple[str, ...] = ()
    command: tuple[str, ...] = ()


class Explanation(Fact):
    """What vLLM does, and what is known of the log.

    Attributes:
        path: the checkpoint; "" if there is none.
        family, dialect: of the checkpoint.
        groups: of the target and the draft.
        notes: sentences on the KV cache, on what the draft takes from the target, and on the dry
            load.
        findings: of the check.
        answers: failures of the log that are known.
        unknown: exceptions of the log that are not.
        log_lines: lines of the log that were looked at; None without a log.
        log_version: vLLM's version, as the log says it.
    """

    path: str = ""
    family: str = ""
    dialect: str = ""
    groups: tuple[BuiltGroup, ...] = ()
    notes: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    answers: tuple[Recognized, ...] = ()
    unknown: tuple[str, ...] = ()
    log_lines: int | None = None
    log_version: str = ""

    @property
    def is_explained(self) -> bool:
        """Something in the log is known, if one was given; else the modules of the checkpoint are
        known.
        """
        return bool(self.groups) if self.log_lines is None else bool(self.answers)


def explain(checked: Checked | None, log: Log | None) -> Explanation:
    """Tell what is known.

    Args:
        checked: the static check, and dry loads if there are any; None without a checkpoint.
        log: None without one.
    """
    told: dict[str, object] = {}
    if checked is not None:
        data, runtime = checked.data, checked.runtime
        account = next(iter(checked.accounts), None)
        told |= {"path": data.path, "family": data.facts.family, "dialect": data.facts.dialect}
        told |= {"findings": data.findings, "notes": tuple(_notes(runtime, account))}
        told["groups"] = groups_of(runtime) if runtime is not None else ()
    if log is not None:
        answers, unknown = _answers(log, checked)
        told |= {"answers": answers, "unknown": unknown}
        told |= {"log_lines": len(log.lines), "log_version": log.version}
    return Explanation.model_validate(told)


def _notes(runtime: RuntimeView | None, account: LoadAccount | None) -> Iterator[str]:
    if runtime is not None:
        given = runtime.given
        asked = given.raw.get("kv_cache_scheme") or given.get("kv_cache_quant_algo")
        is_latent = runtime.view.text_config.get("kv_lora_rank")
        if asked and is_latent and isinstance(runtime.dialect, CompressedTensors):
            yield "kv_cache_scheme has no effect: latent attention keeps its KV cache in BF16."
        elif asked:
            if isinstance(asked, Mapping):
                asked = f"{asked.get('type')} with {asked.get('num_bits')} bits"
            note = f"The KV cache of target and draft is {shortened(str(asked))}"
            yield f"{note}, unless --kv-cache-dtype says otherwise."
    if account is not None and account.load.draft.shared:
        shared = ", ".join(account.load.draft.shared)
        yield f"After loading, vLLM gives the draft the target's {shared}."
    if account is not None and (failure := account.load.failure):
        said = shortened(f"{failure.type}: {' '.join(failure.words.split())}")
        yield f"In the dry load on {account.load.gpu} vLLM stops: {said} ({failure.at})."


def _answers(log: Log, checked: Checked | None) -> tuple[tuple[Recognized, ...], tuple[str, ...]]:
    """Each known failure of the log once, and the last exceptions that nobody knows."""
    family = checked.runtime.view.family.model_type if checked and checked.runtime else ""
    answers: dict[str, Recognized] = {}
    unknown: list[str] = []
    for line in dict.fromkeys((*log.raised, *log.lines)):
        at = log.raised.get(line, "")
        kinds = IN_LOGS[:1] if at.startswith("sglang/") else IN_LOGS
        found = known_failure(f"{line} [{at}]", kinds=kinds, family=family)
        if found is not None:
            answers.setdefault(found[0].name, _recognized(*found, line, at, checked))
        elif line in log.raised and not line.startswith(_FOLLOW_UPS):
            unknown.append(shortened(f"{line} ({at})" if at else line))
    return tuple(answers.values()), tuple(unknown[-_MOST_UNKNOWN:])


def _recognized(
    known: KnownFailure, named: str, line: str, at: str, checked: Checked | None
) -> Recognized:
    path, culprit, confirmed = "PATH", "", list[str]()
    if checked is not None:
        path = checked.data.path
        for finding in checked.data.findings:
            if finding.rule in known.rules:
                more = f" and {finding.count - 1:,} more" if finding.count > 1 else ""
                confirmed.append(f"{finding.where}{more}: {finding.says}")
        if checked.runtime is not None and named:
            culprit = on_disk(checked.runtime, named, is_draft="mtp" in at or "mtp" in line.lower())
    return Recognized(
        failure=known,
        line=shortened(line),
        names=named,
        on_disk=culprit,
        confirmed=tuple(confirmed),
        command=tuple(word.replace("PATH", path) for word in known.command.split()),
    )


def groups_of(runtime: RuntimeView) -> tuple[BuiltGroup, ...]:
    """Every group, in the order in which the files have them, the backbone's first."""
    found: dict[tuple[str, ...], list[tuple[Module, str]]] = defaultdict(list)
    for module in runtime.modules:
        stored = " + ".join(sorted({_stored(member.weight) for member in module.members}))
        reason, entry = _why(runtime, module)
        key = module.part, module.role, _built(module), stored, reason
        found[key].append((module, entry))
    groups: list[BuiltGroup] = []
    for (part, role, built, stored, reason), decided in found.items():
        files: list[str] = []
        for module, _ in decided:
            for member in module.members:
                files += [tensor.file for tensor in member.weight.parts.values()]
        first, *others = dict.fromkeys(entry for _, entry in decided)
        why = f"{reason} {first}"
        if others:
            why += f" and {len(others):,} more for the others"
        group = BuiltGroup(
            part=part,
            modules=_ROLES.get(role, role),
            count=len(decided),
            first=decided[0][0].name,
            built=built,
            stored=stored,
            tensors=len(files),
            files=len({*files}),
            first_file=min(files),
            why=why.rstrip(),
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
