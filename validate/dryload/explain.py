"""`keepmtp explain`: what vLLM does with a checkpoint, and what a serve log says of its failure.

In: what the check found of a checkpoint, and a `Log`; one of them may be missing. Out: an
`Explanation`.

Easy to get wrong: a log may be of another checkpoint, of another version, or of a failure that
nobody knows. So each answer says what of it the check confirms here, and an exception that no table
knows is called unknown.
"""

from collections.abc import Iterator, Mapping

from ...checkpoints.fact import Fact
from ...recipes.errors import shortened
from ..check.check import Checked
from ..check.dialects.choose import quantization_of
from ..check.dialects.compressed_tensors import CompressedTensors
from ..check.runtime_view import RuntimeView
from ..facts.dry_load import LoadAccount
from ..facts.findings import Finding
from .failures import IN_LOGS, KnownFailure, known_failure
from .groups import BuiltGroup, attention_of, groups_of
from .log import Log
from .trace import on_disk

_MOST_UNKNOWN = 5
# What the engine and the server say after a worker has failed.
_FOLLOW_UPS = (
    "EngineDeadError",
    "EngineGenerateError",
    "RuntimeError: Engine core initialization failed",
)


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
        told["groups"] = groups_of(runtime, account) if runtime is not None else ()
    if log is not None:
        answers, unknown = _answers(log, checked)
        told |= {
            "answers": answers,
            "unknown": unknown,
            "log_lines": len(log.lines),
            "log_version": log.version,
        }
    return Explanation.model_validate(told)


def _notes(runtime: RuntimeView | None, account: LoadAccount | None) -> Iterator[str]:
    if runtime is not None and (cache := _kv_cache(runtime)):
        yield cache
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


def _kv_cache(runtime: RuntimeView) -> str:
    given = quantization_of(runtime.source.config) or runtime.hf_quant_config or {}
    nested = given.get("quantization")
    inner = nested if isinstance(nested, Mapping) else given
    asked = given.get("kv_cache_scheme") or inner.get("kv_cache_quant_algo")
    if not asked:
        return ""
    if isinstance(runtime.dialect, CompressedTensors) and runtime.view.text_config.get(
        "kv_lora_rank"
    ):
        return "kv_cache_scheme has no effect: latent attention keeps its KV cache in BF16."
    wanted = (
        f"{asked.get('type')} with {asked.get('num_bits')} bits"
        if isinstance(asked, Mapping)
        else str(asked)
    )
    return (
        f"The KV cache of target and draft is {shortened(wanted)}, unless --kv-cache-dtype says "
        "otherwise."
    )


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
