"""Findings from a dry load: what vLLM said or did in silence, the checkpoint's entry that caused it, and the cure.

In: a `LoadAccount`, and the `RuntimeView` of the static check where the family is known. Out: an `Objection` for each
parameter or tensor, in names on disk.

Easy to get wrong: parameters have vLLM's names, but people know names on disk. trace.py finds the one from the other.
Nothing here names the GPU: check_on.py does, because one cause on several GPUs is one finding.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from ...recipes.family import HFName
from ...recipes.family_view import Place
from ..check.rules_kv import is_kv_scale
from ..check.runtime_view import RuntimeView
from ..facts.dry_load import ROLES, Fault, KernelUse, LoadAccount, LoadedModel, LoadFailure, Misfit, ModelAccount, Role
from ..facts.findings import Finding, Objection, Severity, objection
from .defects import NAMELESS_HEAD, known_defect
from .refusals import FOR_AMD, known_refusal
from .trace import Trace

RULE = "dry-load"
DEFECT = "vllm-defect"
# Buffers that vLLM computes itself, and GPTQ's order of inputs, which it refuses where it is not the natural one: its
# loaders skip both (quantization/base_config.py, get_checkpoint_weight_mapper).
_RECOMPUTED = re.compile(r"\.rotary_emb\.(inv_freq|cos_cached|sin_cached)$|\.g_idx$")
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


def objections(
    account: LoadAccount,
    runtime: RuntimeView | None,
    *,
    version: str,
    static: Iterable[Finding] = (),
    draft: RuntimeView | None = None,
) -> list[Objection]:
    """Everything that is wrong on this GPU at this TP size.

    Args:
        account: of the dry load.
        runtime: the static check's; None where the family has no table.
        draft: that of the draft, where it has a checkpoint of its own.
        version: of vLLM.
        static: findings of the static check; their cures are better than general ones.
    """
    case = _Case(account=account, runtime=runtime, draft=draft or runtime, version=version, static=tuple(static))
    failure = account.load.failure
    return [*case.nameless_heads(), *(case.failure(failure) if failure else case.silence())]


@dataclass(frozen=True)
class _Case:
    """One dry load, and what is known about its checkpoint."""

    account: LoadAccount
    runtime: RuntimeView | None
    draft: RuntimeView | None
    version: str
    static: tuple[Finding, ...]

    @cached_property
    def models(self) -> dict[Role, tuple[LoadedModel, ModelAccount]]:
        return {role: self.account.of(role) for role in ROLES}

    @cached_property
    def traces(self) -> dict[str, Trace]:
        known: dict[Role, RuntimeView | None] = {"target": self.runtime, "draft": self.draft}
        return {role: Trace(self.models[role][1].asked, runtime) for role, runtime in known.items() if runtime}

    def nameless_heads(self) -> Iterator[Objection]:
        """A defect of vLLM: no entry can except a head from quantization if vLLM asks about it with an empty name."""
        for role, (model, account) in self.models.items():
            for question in account.asked:
                is_quantized = bool(question.method) and not question.method.startswith("Unquantized")
                if question.layer == "ParallelLMHead" and not question.prefix and is_quantized:
                    says = (
                        f"a defect of vLLM {self.version}, not of this checkpoint: {NAMELESS_HEAD.says} ({model.cls})"
                    )
                    yield self._objection(DEFECT, "lm_head.weight", f"{says}; {_SILENCE[role]}", NAMELESS_HEAD.cure)

    def failure(self, failure: LoadFailure) -> Iterator[Objection]:
        """What vLLM raised."""
        if any(True for _ in self.nameless_heads()) and "head" in (failure.tensor or failure.words):
            return
        words = _said(failure)
        at = f" ({failure.at})" if failure.at else ""
        family = self.draft.view.family.model_type if self.draft else ""
        if defect := known_defect(failure, family=family, version=self.version):
            says = self._of_vllm(f"{defect.says}; {words}{at}")
            yield self._objection(DEFECT, failure.tensor or self._config, says, defect.cure)
            return
        where, cure = known_refusal(failure) or ("", "")
        if "{count}" in where:
            where = self.draft.view.mtp_count_key if self.draft else self._config
        where = where or failure.tensor or self._named_in(failure) or self._config
        act = _ACTS[failure.stage].format(f"the {failure.role}" if failure.role else "the model")
        yield self._objection(
            RULE,
            where,
            f"vLLM {self.version} stops while {act}: {words}{at}",
            self._static_cure(where) or cure or "See what vLLM builds each module as: `keepmtp explain PATH`",
        )

    def silence(self) -> Iterator[Objection]:
        """What vLLM accepted without a message."""
        for role, (model, account) in self.models.items():
            is_nameless = any(not asked.prefix and asked.layer == "ParallelLMHead" for asked in account.asked)
            for fault, what in _faults(account):
                if not (is_nameless and "head" in fault.param):
                    yield self._fault(role, fault, what)
            for misfit, what in _misfits(account):
                if not (is_nameless and "head" in misfit.param):
                    yield self._misfit(role, misfit, what)
            for kernel in model.kernels:
                if kernel.outcome.startswith("refused: "):
                    yield self._no_kernel(role, kernel)
        yield from self._unused()
        yield from self._fp8_cache_on_ada()

    def _no_kernel(self, role: str, kernel: KernelUse) -> Objection:
        where = self._entry_of(role, kernel.where) or kernel.where
        is_attention = "compute capability" in kernel.outcome
        kind = kernel.layer if is_attention or not kernel.method else kernel.method
        says = f"no kernel for {kind} in the {role} ({kernel.count}): {kernel.outcome[9:]}"
        cure = "Choose a scheme that this GPU has a kernel for"
        if kernel.method == "QuarkOCP_MX_MoEMethod":
            cure = FOR_AMD
        if is_attention:
            return self._objection("no-kernel", where, says, "Serve it on another GPU: its attention needs one")
        return self._objection("no-kernel", where, says, self._static_cure(where) or cure)

    def _fp8_cache_on_ada(self) -> Iterator[Objection]:
        """A crash with MTP that people report of sm89, where FlashInfer's attention reads an FP8 cache: vllm #44879."""
        draft = self.models["draft"][0]
        found = [use for use in draft.kernels if use.kernel.startswith("FLASHINFER kv=fp8")]
        if self.account.load.gpu == "sm89" and found:
            says = "an FP8 KV cache, for the draft too, read by FlashInfer: on this GPU people report CUDA errors "
            says += "(illegal memory access) with MTP (vllm #44879, open; its cure #45038 was not merged)"
            cure = "Serve with --kv-cache-dtype bfloat16, which overrules the entry"
            yield self._objection(
                "kv-cache", self._config, f"the quantization config asks for {says}", cure, "", "warning"
            )

    def _of_vllm(self, says: str) -> str:
        return f"a defect of vLLM {self.version}, not of this checkpoint: {says}"

    def _fault(self, role: str, fault: Fault, what: str) -> Objection:
        trace = self.traces.get(role)
        where = trace.entry(fault) if trace else next(iter(fault.sources), fault.param)
        cure = "Bring the missing tensors back from the release"
        if trace and _SCALE.search(fault.param):
            entry = f"re:^{re.escape(trace.module(fault.param))}"
            cure = f"Store its scales, or if its weights are plain, add '{entry}' to ignore"
        says = f"vLLM's {fault.param} {what}, in silence; {_SILENCE[role]}"
        cause = f"{role} {what.split('(')[0]} {fault.param.rpartition('.')[2]}"
        return self._objection(RULE, where, says, self._static_cure(where) or cure, cause)

    def _misfit(self, role: str, misfit: Misfit, what: str) -> Objection:
        where = misfit.tensor.partition(", ")[0] or misfit.param
        says = f"{what} of vLLM's {misfit.param}, in silence; {_SILENCE[role]}"
        cure = "Make config.json's ignore list and targets say what the files hold"
        cause = f"{role} {what} {misfit.param.rpartition('.')[2]}"
        return self._objection(RULE, where, says, self._static_cure(where) or cure, cause)

    def _unused(self) -> Iterator[Objection]:
        for name in self.account.unconsumed:
            holder = self.runtime if self.runtime and name in self.runtime.source.entries else self.draft
            place = holder.view.place(HFName(name)) if holder else None
            is_mtp = place is not None and place.part == "mtp"
            if holder and name.startswith(holder.view.layout.unread):
                continue
            if _RECOMPUTED.search(name) or (place is not None and is_mtp and self._is_left_alone(place)):
                continue
            role = "draft" if is_mtp else "target"
            if is_kv_scale(name.rpartition(".")[2]):
                says = f"{role}: vLLM's class has no parameter for this scale of the KV cache and uses 1.0, in silence"
                yield self._objection("kv-scales", name, says, "Nothing, unless the cache is FP8", role, "warning")
                continue
            says = f"neither target nor draft reads it, in silence; {_SILENCE[role]} if it matters"
            cure = "Compare its name with the release's: vLLM knows it under another, or not at all"
            yield self._objection(RULE, name, says, self._static_cure(name) or cure, f"unused {role}")
        for name, used, size in self.account.truncated:
            says = f"only {used:,} of its {size:,} elements are read, in silence"
            cure = "Compare its shape with the release's and with config.json"
            yield self._objection(RULE, name, says, self._static_cure(name) or cure, "truncated")

    def _is_left_alone(self, place: Place) -> bool:
        """A copy of what the draft takes from the target, or an MTP layer that vLLM does not build."""
        assert self.draft is not None
        view = self.draft.view
        most = view.family.loader.most_layers(self.account.load.k)
        first = 0 if view.layout.mtp else view.num_layers
        is_beyond = bool(most) and place.layer is not None and place.layer - first >= most
        return is_beyond or (place.role in ("embedding", "head") and bool(self.account.load.draft.shared))

    def _named_in(self, failure: LoadFailure) -> str:
        """The entry of a parameter or module that vLLM's message names, else of the module that it built last."""
        roles = [failure.role] if failure.role in self.traces else [*self.traces]
        for name in re.findall(r"\w+(?:\.\w+)+", failure.words):
            for role in roles:
                trace = self.traces[role]
                entries = (trace.module_entry(trace.module(param)) for param in (f"{name}.weight", name))
                if entry := next(filter(None, entries), ""):
                    return entry
        for role, (_, account) in self.models.items():
            if failure.stage == "construct" and failure.role == role and account.asked:
                return self._entry_of(role, account.asked[-1].prefix)
        return ""

    def _entry_of(self, role: str, prefix: str) -> str:
        return self.traces[role].module_entry(prefix) if role in self.traces else ""

    @property
    def _config(self) -> str:
        return f"{self.account.path}/config.json"

    def _static_cure(self, where: str) -> str:
        """The static check's cure for the same tensor or module, else of its only error."""
        errors = [finding for finding in self.static if finding.severity == "error"]
        stem = where.rpartition(".")[0] or where
        for finding in errors:
            if finding.where.startswith(stem) or where.startswith(finding.where):
                return finding.cure
        return errors[0].cure if len(errors) == 1 else ""

    def _objection(
        self, rule: str, where: str, says: str, cure: str, cause: str = "", severity: Severity = "error"
    ) -> Objection:
        return objection(
            origin="dry",
            rule=rule,
            severity=severity,
            where=where,
            says=says,
            cure=cure,
            cause=cause,
        )


def _faults(account: ModelAccount) -> Iterator[tuple[Fault, str]]:
    yield from ((fault, "stays uninitialised memory: nothing on disk fills it") for fault in account.unwritten)
    yield from ((fault, "keeps its placeholder: nothing on disk fills it") for fault in account.default)
    for fault in account.partial:
        yield fault, f"is filled in part only ({fault.num_written:,} of {fault.num_expected:,} elements)"


def _misfits(account: ModelAccount) -> Iterator[tuple[Misfit, str]]:
    yield from ((misfit, f"holds {misfit.given}, which is cast into {misfit.wanted}") for misfit in account.casts)
    yield from ((misfit, f"has shape {misfit.given}, spread over {misfit.wanted}") for misfit in account.broadcasts)


def _said(failure: LoadFailure) -> str:
    """vLLM's message on one line, without the words that pydantic puts around it."""
    words = " ".join(failure.words.split())
    words = re.sub(r"^\d+ validation errors? for \w+ (Value error|Assertion failed), ", "", words)
    words = words.partition(" [type=")[0]
    return f"{failure.type}: {words[:_LONGEST]}" if words else failure.type
