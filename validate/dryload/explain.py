"""`keepmtp explain`: what vLLM builds of a checkpoint, and what a serve log says of its failure.

In: what the check found of a checkpoint, and the bytes of a log, from a file or a pipe, of which
the last ones count; one of them may be missing. Out: an `Explanation`.

Easy to get wrong: modules of one kind need not have one fate. So a group is those that are built,
stored and decided alike. And a log may be of another checkpoint, of another version, or of a
failure that nobody knows. So each answer says what of it the check confirms here, and an exception
that no table knows is called unknown. Every worker writes the same traceback, each line after its
own name and time, and an exception comes again as the cause of others: a line is kept once. Logs
are a stranger's bytes: nothing is printed as it came.
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from io import BufferedIOBase
from operator import attrgetter

from ...checkpoints.dialects.choose import Unquantized
from ...checkpoints.dialects.modelopt import ModelOpt
from ...checkpoints.dialects.runtime_view import Module, RuntimeView
from ...checkpoints.fact import Count, Fact
from ...recipes.errors import printable, shortened
from ...recipes.frozen import Json, frozen
from ..check.check import Checked
from ..facts.findings import Finding
from .failures import DEFECTS_FIRST, IN_LOGS, KnownFailure, known_failure
from .trace import on_disk

_MOST_UNKNOWN = 5
# What the engine and the server say after a worker has failed.
_FOLLOW_UPS = (
    "EngineDeadError",
    "EngineGenerateError",
    "RuntimeError: Engine core initialization failed",
)


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
        findings: of the check.
        answers: failures of the log that are known.
        unknown: exceptions of the log that are not.
        log_lines: lines of the log that were looked at; None without a log.
    """

    path: str = ""
    family: str = ""
    dialect: str = ""
    groups: tuple[BuiltGroup, ...] = ()
    findings: tuple[Finding, ...] = ()
    answers: tuple[Recognized, ...] = ()
    unknown: tuple[str, ...] = ()
    log_lines: int | None = None

    @property
    def is_explained(self) -> bool:
        """Something in the log is known, if one was given; else the modules of the checkpoint are
        known.
        """
        return bool(self.groups if self.log_lines is None else self.answers)


def explain(checked: Checked | None, log: "Log | None") -> Explanation:
    """Tell what is known.

    Args:
        checked: the static check, and dry loads if there are any; None without a checkpoint.
        log: None without one.
    """
    told: Json = {}
    if checked is not None:
        facts = checked.data.facts
        told = {"path": checked.data.path, "family": facts.family, "dialect": facts.dialect}
        told["findings"] = checked.data.findings
        if checked.runtime is not None:
            told["groups"] = groups_of(checked.runtime)
    if log is not None:
        answers, unknown = _answers(log, checked)
        told |= {"answers": answers, "unknown": unknown, "log_lines": len(log.lines)}
    return Explanation(**told)


def _answers(log: "Log", checked: Checked | None) -> tuple[tuple[Recognized, ...], tuple[str, ...]]:
    """Each known failure of the log once, and the last exceptions that nobody knows."""
    of = {"family": "", "dialect": ""}
    usual = IN_LOGS
    path = "PATH"
    findings = ()
    runtime = None
    if checked:
        path = checked.data.path
        findings = checked.data.findings
        runtime = checked.runtime
    if checked and runtime:
        of = {"family": checked.data.facts.family, "dialect": checked.data.facts.dialect}
        if checked.data.ok:
            usual = DEFECTS_FIRST
    answers: dict[str, Recognized] = {}
    unknown: list[str] = []
    for line in dict.fromkeys((*log.raised, *log.lines)):
        at = log.raised.get(line, "")
        kinds = usual
        if at.startswith("sglang/"):
            kinds = IN_LOGS[:1]
        known = known_failure(f"{line} [{at}]", kinds=kinds, **of)
        if known is None:
            if line in log.raised and not line.startswith(_FOLLOW_UPS):
                unknown.append(shortened(f"{line} ({at})".removesuffix(" ()")))
            continue
        failure, named = known
        if failure.name in answers:
            continue  # every worker writes it, and an exception comes again as the cause of others
        culprit = ""
        if runtime and named:
            is_draft = "mtp" in at or "mtp" in line.lower()
            culprit = on_disk(runtime, named, is_draft=is_draft)
        confirming = [finding for finding in findings if finding.rule in failure.rules]
        answers[failure.name] = Recognized(
            failure=failure,
            line=shortened(line),
            names=named,
            on_disk=culprit,
            confirmed=tuple(f"{finding.where}: {finding.says}" for finding in confirming),
            command=tuple(word.replace("PATH", path) for word in failure.command.split()),
        )
    return tuple(answers.values()), tuple(unknown[-_MOST_UNKNOWN:])


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
    if isinstance(dialect, Unquantized):
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


MOST_BYTES = 8 << 20
_CHUNK = 1 << 20
_LONGEST_LINE = 4000
_MOST_LINES = 20_000
_MOST_RAISED = 1_000
_ESCAPES = re.compile(r"\x1b\[[0-9;]{0,20}[A-Za-z]|�\[[0-9;]{1,20}m")
# What stands before the words: vllm-1 | of containers, (Worker_TP0 pid=7), [rank0]:, a level with
# date, time and place, a date alone.
_BEFORE = (
    r"(?:\s{0,4}(?:[\w.-]{1,60} {1,20}\||\(\w{1,60}(?: \w{1,20}=\d{1,9}){0,3}(?:, "
    r"ip=[\d.]{1,40})?\)"
    r"|\[rank\d{1,5}\]:|\[VLLM LOG\]"
    r"|(?:ERROR|WARNING|INFO|DEBUG|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d "
    r"(?:\[[^\]]{1,80}\]|\S{1,60}\])"
    r"|\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[.,\dZ+:]{0,20})){1,6} ?"
)
_FRAME = re.compile(r'^\s{0,20}File "([^"]{1,400})", line (\d{1,7})')
_EXCEPTION = re.compile(
    r"^\s{0,4}([A-Za-z_][\w.]{0,120}(?:Error|Exception))(?::(?: (.{0,3900}))?)?$"
)
_TELLS = (
    "Error",
    "Exception",
    "error",
    "WARNING",
    "assert",
    "cceptance",
    "not found",
    "failed",
    "different",
    "scal",
)
_READ = (*_TELLS, 'File "')


@frozen
class Log:
    """The last part of a log.

    Attributes:
        lines: each line that may tell a failure, once, in order of its first appearance.
        raised: each exception as the log has it, once and in order, with file:line of its last
            frame in vLLM ("" where the log has none).
    """

    lines: tuple[str, ...]
    raised: Mapping[str, str]


def read_log(stream: BufferedIOBase) -> Log:
    """The last `MOST_BYTES` of a file or a pipe; Ctrl-C is the end of a pipe that stays open."""
    kept = bytearray()
    with suppress(KeyboardInterrupt):
        for chunk in iter(partial(stream.read1, _CHUNK), b""):
            kept += chunk
            del kept[:-MOST_BYTES]
    return parse_log(bytes(kept))


def parse_log(raw: bytes) -> Log:
    """Lines and exceptions of a log."""
    lines: dict[str, None] = {}
    raised: dict[str, str] = {}
    at = ""
    for written in raw.decode(errors="replace").splitlines():
        if not _has_one(written[:_LONGEST_LINE], _READ):
            continue
        line = words_of(written)
        frame = _FRAME.match(line)
        if frame:
            # Frames of libraries leave the last one in vLLM.
            at = _place(frame[1], frame[2]) or at
            continue
        exception = _EXCEPTION.match(line)
        if exception:
            kind = exception[1].rpartition(".")[2]
            words = exception[2] or ""
            raised.setdefault(f"{kind}: {words}".removesuffix(": "), at)
            if len(raised) > _MOST_RAISED:  # what ended the server is at the end
                del raised[next(iter(raised))]
            at = ""
        if len(lines) < _MOST_LINES and _has_one(line, _TELLS):
            lines.setdefault(line)
    return Log(lines=tuple(lines), raised=raised)


def _has_one(line: str, words: Sequence[str]) -> bool:
    return any(word in line for word in words)


def words_of(line: str) -> str:
    """A line without the server's own words before it, short enough and fit to be shown."""
    bare = _ESCAPES.sub("", line[:_LONGEST_LINE])
    return printable(re.sub(rf"^{_BEFORE}", "", bare, count=1)).rstrip()


def _place(file: str, line: str) -> str:
    """file:line below vLLM's package, or below vLLM Ascend's or SGLang's; "" for other files."""
    for other in ("vllm_ascend/", "sglang/srt/"):
        _, found, rest = file.rpartition(f"/{other}")
        if found:
            return f"{other}{rest}:{line}"
    package, _, rest = file.replace("\\", "/").rpartition("vllm/")
    is_elsewhere = package and not package.endswith(("packages/", "vllm/", "workspace/"))
    if not rest or is_elsewhere:
        return ""
    return f"vllm/{rest}:{line}"
