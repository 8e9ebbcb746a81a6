"""A dry load's verdict as findings: what vLLM said or left unsaid, the checkpoint's entry that caused it, and the cure.

In: a `Verdict`, and where the family is known the `Evidence` of the static check. Out: `Finding`s in names on disk.

Easy to get wrong: parameters have vLLM's names, people have files (trace.py finds the way back), and one cause leaves
many traces: findings with the same cause become one.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from ...recipes.family import HFName
from ...recipes.family_view import Place
from ..check.findings import Finding
from ..check.runtime_view import Evidence
from .defects import NAMELESS_HEAD, known_defect
from .loader import Failure, Fault, Misfit, Side, Verdict
from .refusals import known_refusal
from .trace import Trace

RULE = "dry-load"
DEFECT = "vllm-defect"
# Buffers that vLLM computes anew, so that its loaders pass over them.
_RECOMPUTED = re.compile(r"\.rotary_emb\.(inv_freq|cos_cached|sin_cached)$")
_SCALE = re.compile(r"scale(_inv|_2)?$|zero_point$")
_LONGEST = 400
_SILENCE = {"target": "answers are garbage", "draft": "the draft guesses, acceptance is near 0 %"}
_ACTS = {
    "config": "reading the config",
    "world": "starting",
    "construct": "building {}",
    "load": "loading {}",
    "share": "giving the draft the target's embedding and head",
    "process": "preparing the weights of {}",
    "crash": "judging",
}


def findings(
    verdict: Verdict,
    evidence: Evidence | None,
    *,
    version: str,
    static: Iterable[Finding] = (),
    draft: Evidence | None = None,
) -> list[Finding]:
    """Everything that is wrong on this GPU at this TP size.

    Args:
        verdict: of the dry load.
        evidence: the static check's; None where the family has no table.
        draft: that of the draft, where it has a checkpoint of its own.
        version: of vLLM.
        static: what the static check found: its cure for an entry is better than a general one.
    """
    case = _Case(verdict=verdict, evidence=evidence, draft=draft or evidence, version=version, static=tuple(static))
    return [*case.nameless_heads(), *(case.failure() if verdict.failure else case.silence())]


@dataclass(frozen=True)
class _Case:
    """One verdict, and what is known about its checkpoint."""

    verdict: Verdict
    evidence: Evidence | None
    draft: Evidence | None
    version: str
    static: tuple[Finding, ...]

    @cached_property
    def sides(self) -> dict[str, Side]:
        return {"target": self.verdict.target, "draft": self.verdict.draft}

    @cached_property
    def traces(self) -> dict[str, Trace]:
        known = {"target": self.evidence, "draft": self.draft}
        return {role: Trace(self.sides[role], evidence) for role, evidence in known.items() if evidence}

    def nameless_heads(self) -> Iterator[Finding]:
        """vLLM's own defect: a head that no entry can except from quantization, since it asks with an empty name."""
        for role, side in self.sides.items():
            for question in side.asked:
                is_quantized = bool(question.method) and not question.method.startswith("Unquantized")
                if question.layer == "ParallelLMHead" and not question.prefix and is_quantized:
                    says = f"a defect of vLLM {self.version}, not of this checkpoint: {NAMELESS_HEAD.says} ({side.cls})"
                    yield self._finding(DEFECT, "lm_head.weight", f"{says}; {_SILENCE[role]}", NAMELESS_HEAD.cure)

    def failure(self) -> Iterator[Finding]:
        """What vLLM raised."""
        failure = self.verdict.failure
        assert failure is not None
        if any(True for _ in self.nameless_heads()) and "head" in (failure.tensor or failure.words):
            return
        words = _said(failure)
        at = f" ({failure.at})" if failure.at else ""
        family = self.draft.view.family.model_type if self.draft else ""
        if defect := known_defect(failure, family=family, version=self.version):
            says = f"a defect of vLLM {self.version}, not of this checkpoint: {defect.says}; {words}{at}"
            yield self._finding(DEFECT, failure.tensor or self._config, says, defect.cure)
            return
        where, cure = known_refusal(failure) or ("", "")
        if "{count}" in where:
            where = self.draft.view.mtp_count_key if self.draft else self._config
        where = where or failure.tensor or self._named_in(failure) or self._config
        act = _ACTS[failure.stage].format(f"the {failure.role}" if failure.role else "the model")
        yield self._finding(
            RULE,
            where,
            f"vLLM {self.version} stops while {act}: {words}{at}",
            self._static_cure(where) or cure or "Read vLLM's message; `keepmtp check` without --gpu may say more",
        )

    def silence(self) -> Iterator[Finding]:
        """What vLLM accepted without a word."""
        for role, side in self.sides.items():
            is_nameless = any(not question.prefix and question.layer == "ParallelLMHead" for question in side.asked)
            for fault, what in _faults(side):
                if not (is_nameless and "head" in fault.param):
                    yield self._fault(role, fault, what)
            for misfit, what in _misfits(side):
                if not (is_nameless and "head" in misfit.param):
                    yield self._misfit(role, misfit, what)
            for kernel in side.kernels:
                if kernel.outcome.startswith("refused: "):
                    where = self._entry_of(role, kernel.where) or kernel.where
                    says = f"no kernel for {kernel.method} in the {role} ({kernel.count}): {kernel.outcome[9:]}"
                    cure = self._static_cure(where) or "Choose a scheme that this GPU has a kernel for"
                    yield self._finding("no-kernel", where, says, cure)
        yield from self._unused()

    def _fault(self, role: str, fault: Fault, what: str) -> Finding:
        trace = self.traces.get(role)
        where = trace.entry(fault) if trace else next(iter(fault.sources), fault.param)
        cure = "Bring the missing tensors back from the release"
        if trace and _SCALE.search(fault.param):
            entry = f"re:^{re.escape(trace.module(fault.param))}"
            cure = f"Store its scales, or if its weights are plain, add '{entry}' to ignore"
        says = f"vLLM's {fault.param} {what}, in silence; {_SILENCE[role]}"
        cause = f"{role} {what.split('(')[0]} {fault.param.rpartition('.')[2]}"
        return self._finding(RULE, where, says, self._static_cure(where) or cure, cause)

    def _misfit(self, role: str, misfit: Misfit, what: str) -> Finding:
        where = misfit.tensor.partition(", ")[0] or misfit.param
        says = f"{what} of vLLM's {misfit.param}, in silence; {_SILENCE[role]}"
        cure = "Make config.json's ignore list and targets say what the files hold"
        cause = f"{role} {what} {misfit.param.rpartition('.')[2]}"
        return self._finding(RULE, where, says, self._static_cure(where) or cure, cause)

    def _unused(self) -> Iterator[Finding]:
        for name in self.verdict.unconsumed:
            holder = self.evidence if self.evidence and name in self.evidence.source.entries else self.draft
            place = holder.view.place(HFName(name)) if holder else None
            is_mtp = place is not None and place.part == "mtp"
            if _RECOMPUTED.search(name) or (place is not None and is_mtp and self._is_left_alone(place)):
                continue
            role = "draft" if is_mtp else "target"
            says = f"neither target nor draft reads it, in silence; {_SILENCE[role]} if it matters"
            cure = "Compare its name with the release's: vLLM knows it under another, or not at all"
            yield self._finding(RULE, name, says, self._static_cure(name) or cure, f"unused {role}")
        for name, used, size in self.verdict.truncated:
            says = f"only {used:,} of its {size:,} elements are read, in silence"
            cure = "Compare its shape with the release's and with config.json"
            yield self._finding(RULE, name, says, self._static_cure(name) or cure, "truncated")

    def _is_left_alone(self, place: Place) -> bool:
        """A copy of what the draft takes from the target, or an MTP layer beyond those that vLLM reads at all."""
        assert self.draft is not None
        view = self.draft.view
        num_used = view.family.loader.num_layers_used
        first = 0 if view.layout.mtp else view.num_layers
        is_beyond = bool(num_used) and place.layer is not None and place.layer - first >= num_used
        return is_beyond or (place.role in ("embedding", "head") and bool(self.verdict.draft.shared))

    def _named_in(self, failure: Failure) -> str:
        """The entry of a parameter or module that vLLM's message names, else of the module it built last."""
        roles = [failure.role] if failure.role in self.traces else [*self.traces]
        for name in re.findall(r"\w+(?:\.\w+)+", failure.words):
            for role in roles:
                trace = self.traces[role]
                entries = (trace.module_entry(trace.module(param)) for param in (f"{name}.weight", name))
                if entry := next(filter(None, entries), ""):
                    return entry
        if failure.stage == "construct" and failure.role in self.traces and self.sides[failure.role].asked:
            return self._entry_of(failure.role, self.sides[failure.role].asked[-1].prefix)
        return ""

    def _entry_of(self, role: str, prefix: str) -> str:
        return self.traces[role].module_entry(prefix) if role in self.traces else ""

    @property
    def _config(self) -> str:
        return f"{self.verdict.path}/config.json"

    def _static_cure(self, where: str) -> str:
        """The static check's cure for the same tensor or module, else of its only error."""
        errors = [finding for finding in self.static if finding.severity == "error"]
        stem = where.rpartition(".")[0] or where
        for finding in errors:
            if finding.where.startswith(stem) or where.startswith(finding.where):
                return finding.cure
        return errors[0].cure if len(errors) == 1 else ""

    def _finding(self, rule: str, where: str, says: str, cure: str, cause: str = "") -> Finding:
        told = f"on {self.verdict.gpu} at TP {self.verdict.tp}: {says}"
        place = f"{self.verdict.gpu} {self.verdict.tp} {cause}" if cause else ""
        return Finding(rule=rule, severity="error", where=where, says=told, cure=cure, cause=place)


def _faults(side: Side) -> Iterator[tuple[Fault, str]]:
    yield from ((fault, "stays uninitialised memory: nothing on disk fills it") for fault in side.unwritten)
    yield from ((fault, "keeps its placeholder: nothing on disk fills it") for fault in side.default)
    for fault in side.partial:
        yield fault, f"is filled in part only ({fault.num_written:,} of {fault.num_expected:,} elements)"


def _misfits(side: Side) -> Iterator[tuple[Misfit, str]]:
    yield from ((misfit, f"holds {misfit.given}, which is cast into {misfit.wanted}") for misfit in side.casts)
    yield from ((misfit, f"has shape {misfit.given}, spread over {misfit.wanted}") for misfit in side.broadcasts)


def _said(failure: Failure) -> str:
    """vLLM's message on one line; pydantic's frame around it says nothing about the checkpoint."""
    words = " ".join(failure.words.split())
    words = re.sub(r"^\d+ validation errors? for \w+ (Value error|Assertion failed), ", "", words)
    words = words.partition(" [type=")[0]
    return f"{failure.type}: {words[:_LONGEST]}" if words else failure.type
