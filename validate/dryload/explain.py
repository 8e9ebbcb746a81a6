"""`keepmtp explain`: what vLLM does with a checkpoint, and what a serve log says of its failure.

In: what the check found of a checkpoint, and a `Log`; one of them may be missing. Out: an `Explanation`.

Easy to get wrong: a log may be of another checkpoint, of another version, or of a failure that nobody knows. So each
answer says what of it the check confirms here, and an exception that no table knows is called unknown.
"""

from collections.abc import Iterator, Mapping, Sequence

from ...checkpoints.fact import Fact
from ...recipes.errors import shortened
from ...recipes.family import HFName
from ..check.check import Checked
from ..check.dialects.choose import quantization_of
from ..check.dialects.compressed_tensors import CompressedTensors
from ..check.runtime_view import Module, RuntimeView
from ..facts.dry_load import LoadAccount, LoadFailure
from ..facts.findings import Finding
from .defects import known_defect
from .failure import Command, KnownFailure
from .groups import BuiltGroup, attention_of, groups_of
from .known import known_failure
from .known_sglang import IN_SGLANG
from .log import Log, Raised
from .refusals import known_refusal

# Where in vLLM an exception is about the checkpoint.
_OF_CHECKPOINTS = ("vllm/model_executor/", "vllm/models/", "vllm/config/", "vllm/transformers_utils/")
_MOST_UNKNOWN = 5
READ_FROM = "0.32.0"
DEFECT = "a defect of vLLM"
REFUSAL = "a refusal that dry loads have met"


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
        notes: sentences on the KV cache, on what the draft takes from the target, and on the dry load.
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
        """Something in the log is known, if one was given; else the modules of the checkpoint are known."""
        return bool(self.groups) if self.log_lines is None else bool(self.answers)


def explain(checked: Checked | None, log: Log | None) -> Explanation:
    """Tell what is known.

    Args:
        checked: the static check, and dry loads if there are any; None without a checkpoint.
        log: None without one.
    """
    of_checkpoint = {} if checked is None else _of_checkpoint(checked)
    of_log = {} if log is None else _of_log(log, checked)
    return Explanation.model_validate(of_checkpoint | of_log)


def _of_checkpoint(checked: Checked) -> dict[str, object]:
    data, runtime = checked.data, checked.runtime
    account = checked.accounts[0] if checked.accounts else None
    return {
        "path": data.path,
        "family": data.facts.family,
        "dialect": data.facts.dialect,
        "findings": data.findings,
        "groups": groups_of(runtime, account) if runtime is not None else (),
        "notes": tuple(_notes(runtime, account)),
    }


def _notes(runtime: RuntimeView | None, account: LoadAccount | None) -> Iterator[str]:
    if runtime is not None:
        yield from filter(None, (_no_mtp(runtime), _kv_cache(runtime)))
    if account is None:
        return
    load = account.load
    for role in ("target", "draft"):
        if backends := attention_of(account, role):
            yield f"On {load.gpu} the {role}'s attention runs on {backends}."
    if load.draft.shared:
        yield f"After loading, vLLM gives the draft the target's {', '.join(load.draft.shared)}."
    if load.failure is not None:
        said = f"{load.failure.type}: {' '.join(load.failure.words.split())}"
        yield f"In the dry load on {load.gpu} vLLM stops: {shortened(said)} ({load.failure.at})."


def _no_mtp(runtime: RuntimeView) -> str:
    """What becomes of a draft without an MTP block; "" where there is one."""
    if any(module.part == "mtp" for module in runtime.modules):
        return ""
    if not runtime.promised:
        return "There is no MTP block, and config.json promises none: it can be served, but not with method=mtp."
    is_refused = runtime.view.family.loader.refuses_missing_mtp
    then = "vLLM raises" if is_refused else "the draft is made from noise, in silence"
    layers = "1 MTP layer" if runtime.promised == 1 else f"{runtime.promised} MTP layers"
    return f"config.json promises {layers}, and no tensor of it is here: with method=mtp {then}."


def _kv_cache(runtime: RuntimeView) -> str:
    given = quantization_of(runtime.source.config) or runtime.hf_quant_config or {}
    nested = given.get("quantization")
    inner = nested if isinstance(nested, Mapping) else given
    asked = given.get("kv_cache_scheme") or inner.get("kv_cache_quant_algo")
    if not asked:
        return ""
    is_left = isinstance(runtime.dialect, CompressedTensors) and runtime.view.text_config.get("kv_lora_rank")
    if is_left:
        return "kv_cache_scheme has no effect: latent attention keeps its KV cache in BF16."
    wanted = f"{asked.get('type')} with {asked.get('num_bits')} bits" if isinstance(asked, Mapping) else str(asked)
    return f"The KV cache of target and draft is {shortened(wanted)}, unless --kv-cache-dtype says otherwise."


def _of_log(log: Log, checked: Checked | None) -> dict[str, object]:
    answers: dict[str, Recognized] = {}
    unknown: list[str] = []
    for raised in log.raised:
        if (answer := _answer(raised, checked)) is not None:
            answers.setdefault(answer.failure.name, answer)
        elif not _is_follow_up(raised):
            unknown.append(shortened(raised.line + (f" ({raised.at})" if raised.at else "")))
    told = {raised.line for raised in log.raised}
    for line in log.lines:
        if line not in told and (found := known_failure(line)) is not None:
            answers.setdefault(found[0].name, _from_table(*found, line, "", checked))
    return {
        "answers": tuple(answers.values()),
        "unknown": tuple(unknown[-_MOST_UNKNOWN:]),
        "log_lines": len(log.lines),
        "log_version": log.version,
    }


def _is_follow_up(raised: Raised) -> bool:
    """What the engine and the server say after a worker has failed."""
    return "Engine core initialization failed" in raised.words or raised.type in (
        "EngineDeadError",
        "EngineGenerateError",
    )


def _answer(raised: Raised, checked: Checked | None) -> Recognized | None:
    """By the table of failures, then by the defects and refusals that dry loads have met."""
    found = known_failure(f"{raised.line} [{raised.at}]")
    is_of_server = found is not None and (found[0] in IN_SGLANG or not raised.at.startswith("sglang/"))
    if found is not None and is_of_server:
        return _from_table(*found, raised.line, raised.at, checked)
    failure = LoadFailure(stage="load", role="", type=raised.type, words=raised.words, at=raised.at)
    runtime = checked.runtime if checked else None
    families = [runtime.view.family.model_type] if runtime else ["step3p5", "step3p7", "qwen4_exp", "kimi_k3"]
    for family in families:
        if (defect := known_defect(failure, family=family, version=READ_FROM)) is not None:
            says = f"a defect of vLLM, not of the checkpoint: {defect.says}"
            return _met(DEFECT, raised, says, defect.cure, concerns=", ".join(defect.versions))
    if raised.at.startswith(_OF_CHECKPOINTS) and (refusal := known_refusal(failure)) is not None:
        where, cure = refusal
        says = "vLLM refuses the checkpoint" + (f" for {where}" if where and "{" not in where else "")
        return _met(REFUSAL, raised, says, cure, concerns=READ_FROM)
    return None


def _met(name: str, raised: Raised, says: str, cure: str, *, concerns: str) -> Recognized:
    """A failure that only dry loads have met."""
    sources = "dry loads of vLLM 0.32.0"
    known = KnownFailure(name=name, words="", sources=sources, concerns=concerns, says=says, cure=cure)
    return Recognized(failure=known, line=shortened(raised.line))


def _from_table(known: KnownFailure, named: str, line: str, at: str, checked: Checked | None) -> Recognized:
    runtime = checked.runtime if checked else None
    path = checked.data.path if checked else "PATH"
    return Recognized(
        failure=known,
        line=shortened(line),
        names=named,
        on_disk=on_disk(runtime, named, is_draft="mtp" in at or "mtp" in line.lower()) if runtime and named else "",
        confirmed=tuple(_confirmed(checked, known)),
        command=tuple(_command(known.command, path)),
    )


def _confirmed(checked: Checked | None, known: KnownFailure) -> Iterator[str]:
    for finding in checked.data.findings if checked else ():
        if finding.rule in known.rules:
            more = f" and {finding.count - 1:,} more" if finding.count > 1 else ""
            yield f"{finding.where}{more}: {finding.says}"


def _command(command: Command, path: str) -> Sequence[str]:
    match command:
        case "graft":
            return ("graft", path, "--from", "RELEASE", "--out", "NEW")
        case "fix":
            return ("fix", path, "--out", "NEW")
        case "convert":
            return ("convert", path, "--to", "compressed-tensors", "--out", "NEW")
        case "values":
            return ("check", path, "--values")
        case "check":
            return ("check", path)
        case _:
            return ()


def on_disk(runtime: RuntimeView, named: str, *, is_draft: bool) -> str:
    """The tensor of the checkpoint that a name of vLLM's log means; "" where none is found.

    Loaders cut names at both ends: `layers.0.mlp.experts.w2_weight` may be the draft's or the target's. The draft's is
    meant if the log speaks of it.
    """
    if HFName(named) in runtime.source.entries:
        return named
    words = named.replace(".mtp_block", "").replace(".routed_experts", "").split(".")
    for end in range(len(words), 1, -1):
        wanted = ".".join(words[:end])
        found = [module for module in runtime.modules if _is_meant(module.name, wanted)]
        if found:
            best = min(found, key=lambda module: (module.part != "mtp") if is_draft else (module.part == "mtp"))
            return _first_tensor(best)
    return ""


def _is_meant(module: str, wanted: str) -> bool:
    return module == wanted or module.endswith(f".{wanted}") or wanted.endswith(f".{module}")


def _first_tensor(module: Module) -> str:
    return next(entry.name for entry in module.members[0].weight.parts.values())
