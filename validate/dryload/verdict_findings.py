"""Findings from a dry load: what vLLM said or did in silence, the checkpoint's entry that caused
it, and the cure.

In: a `LoadAccount`, and the `RuntimeView` of the static check where the family is known. Out: an
`Objection` for each parameter or tensor, in names on disk.

Easy to get wrong: parameters have vLLM's names, but people know names on disk. trace.py finds the
one from the other. Nothing here names the GPU: check_on.py does, because one cause on several GPUs
is one finding.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ...recipes.family import HFName
from ...recipes.family_view import Place
from ..check.rules_kv import is_kv_scale
from ..check.runtime_view import RuntimeView
from ..facts.dry_load import ROLES, Fault, KernelUse, LoadAccount, LoadFailure, Misfit, Role
from ..facts.findings import Finding, Objection, Severity, objection
from .failures import known_defect, known_failure, text_of
from .trace import Trace, on_disk

RULE = "dry-load"
DEFECT = "vllm-defect"
# Buffers that vLLM computes itself, and GPTQ's order of inputs, which it refuses where it is not
# the natural one: its loaders skip both (quantization/base_config.py,
# get_checkpoint_weight_mapper).
_RECOMPUTED = re.compile(r"\.rotary_emb\.(inv_freq|cos_cached|sin_cached)$|\.g_idx$")
_SCALE = re.compile(r"scale(_inv|_2)?$|zero_point$")
_LONGEST = 400
_SILENCE = {"target": "answers are garbage", "draft": "the draft guesses, acceptance is near 0 %"}
_COMPRESSED = "Export with compressed-tensors instead of modelopt: its targets pass over heads"
_FILES = (
    "Make config.json's ignore list and targets say what the files hold: `keepmtp explain PATH` "
    "shows what vLLM builds"
)
_RELEASE = (
    "Compare its name and shape with the release's: vLLM knows it under another name, or not at all"
)
_ADA = (
    "the quantization config asks for an FP8 KV cache, for the draft too, read by FlashInfer: on "
    "this GPU people report CUDA errors (illegal memory access) with MTP (vllm #44879, open; its "
    "cure #45038 was not merged)"
)
_ACTS = {
    "config": "reading the config",
    "world": "starting",
    "construct": "building the {}",
    "load": "loading the {}",
    "share": "giving the draft the target's embedding and head",
    "process": "preparing the weights of the {}",
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
    views = {"target": runtime, "draft": draft or runtime}
    errors = [finding for finding in static if finding.severity == "error"]
    case = _Case(account=account, views=views, version=version, errors=errors)
    failure = account.load.failure
    if failure is None:
        return [*case.nameless_heads(), *case.silence(), *case.unused()]
    if case.nameless and "head" in (failure.tensor or failure.words):
        return [*case.nameless_heads()]
    return [*case.nameless_heads(), case.failed(failure)]


@dataclass(frozen=True, kw_only=True)
class _Case:
    """One dry load, and what is known about its checkpoint."""

    account: LoadAccount
    views: Mapping[str, RuntimeView | None]
    version: str
    errors: Sequence[Finding]

    @cached_property
    def traces(self) -> Mapping[str, Trace]:
        return {
            role: Trace(self.account.of(role)[1].asked, view)
            for role in ROLES
            if (view := self.views[role])
        }

    @cached_property
    def nameless(self) -> Sequence[Role]:
        """Whose quantized head vLLM asks about with an empty name."""
        nameless: list[Role] = []
        for role in ROLES:
            for asked in self.account.of(role)[1].asked:
                is_quantized = bool(asked.method) and not asked.method.startswith("Unquantized")
                if asked.layer == "ParallelLMHead" and not asked.prefix and is_quantized:
                    nameless.append(role)
        return nameless

    def nameless_heads(self) -> Iterator[Objection]:
        """A defect of vLLM: no entry of a quantization config can except a head that has no
        name.
        """
        for role in self.nameless:
            says = (
                f"a defect of vLLM {self.version}, not of the checkpoint: "
                f"{self.account.of(role)[0].cls} has a head "
            )
            says += f"without a name, so no entry can except it from quantization; {_SILENCE[role]}"
            yield _objection(DEFECT, "lm_head.weight", says, _COMPRESSED)

    def failed(self, failure: LoadFailure) -> Objection:
        """What vLLM raised."""
        said = _said(failure)
        draft = self.views["draft"]
        family = draft.view.family.model_type if draft else ""
        if defect := known_defect(failure, family=family, version=self.version):
            return _objection(
                DEFECT, failure.tensor or self._config, f"{defect.says}; {said}", defect.cure
            )
        where, cure = "", _FILES
        if found := known_failure(text_of(failure), kinds=("dry_load", "failures")):
            count = draft.view.mtp_count_key if draft else self._config
            where, cure = found[0].where.format(named=found[1], count=count), found[0].cure
        act = _ACTS[failure.stage].format(failure.role or "model")
        where = where or failure.tensor or self._named_in(failure) or self._config
        return self._wrong(where, f"vLLM {self.version} stops while {act}: {said}", cure)

    def silence(self) -> Iterator[Objection]:
        """What vLLM accepted without a message."""
        for role in ROLES:
            model, written = self.account.of(role)
            is_nameless = role in self.nameless
            for fault in (*written.unwritten, *written.default, *written.partial):
                if not (is_nameless and "head" in fault.param):
                    yield self._fault(role, fault)
            for misfit in (*written.casts, *written.broadcasts):
                if not (is_nameless and "head" in misfit.param):
                    yield self._misfit(role, misfit)
            for use in model.kernels:
                if use.outcome.startswith("refused: "):
                    yield self._no_kernel(role, use)
        draft = self.account.load.draft
        if self.account.load.gpu == "sm89" and any(
            use.kernel.startswith("FLASHINFER kv=fp8") for use in draft.kernels
        ):
            cure = "Serve with --kv-cache-dtype bfloat16, which overrules the entry"
            yield _objection("kv-cache", self._config, _ADA, cure, severity="warning")

    def unused(self) -> Iterator[Objection]:
        """Tensors that neither target nor draft read, or not to their end."""
        for name in self.account.unconsumed:
            target, draft = self.views.values()
            holder = target if target and name in target.source.entries else draft
            place = holder.view.place(HFName(name)) if holder else None
            role = "draft" if place is not None and place.part == "mtp" else "target"
            is_unread = holder is not None and name.startswith(holder.view.layout.unread)
            if (
                is_unread
                or _RECOMPUTED.search(name)
                or (place is not None and self._is_left_alone(place))
            ):
                continue
            if is_kv_scale(name.rpartition(".")[2]):
                says = (
                    f"{role}: vLLM's class has no parameter for this scale of the KV cache and "
                    "uses 1.0, in silence"
                )
                yield _objection(
                    "kv-scales", name, says, "Nothing, unless the cache is FP8", role, "warning"
                )
            else:
                says = (
                    f"neither target nor draft reads it, in silence; {_SILENCE[role]} if it matters"
                )
                yield self._wrong(name, says, _RELEASE, f"unused {role}")
        for name, used, size in self.account.truncated:
            says = f"only {used:,} of its {size:,} elements are read, in silence"
            yield self._wrong(name, says, _RELEASE, "truncated")

    def _is_left_alone(self, place: Place) -> bool:
        """A copy of what the draft takes from the target, or an MTP layer that vLLM does not
        build.
        """
        draft = self.views["draft"]
        if draft is None or place.part != "mtp":
            return False
        most = draft.view.family.loader.most_layers(self.account.load.k)
        first = 0 if draft.view.layout.mtp else draft.view.num_layers
        is_beyond = bool(most) and place.layer is not None and place.layer - first >= most
        return is_beyond or (
            place.role in ("embedding", "head") and bool(self.account.load.draft.shared)
        )

    def _fault(self, role: Role, fault: Fault) -> Objection:
        where, leaf = next(iter(fault.sources), fault.param), fault.param.rpartition(".")[2]
        cure = "Bring the missing tensors back from the release"
        if trace := self.traces.get(role):
            where = trace.entry(fault)
            if _SCALE.search(leaf):
                entry = f"re:^{re.escape(trace.module(fault.param))}"
                cure = f"Store its scales, or if its weights are plain, add '{entry}' to ignore"
        what, cause = "is filled by nothing on disk", "empty"
        if fault.num_written:
            what = (
                f"is filled in part only ({fault.num_written:,} of {fault.num_expected:,} elements)"
            )
            cause = "partial"
        says = f"vLLM's {fault.param} {what}, in silence; {_SILENCE[role]}"
        return self._wrong(where, says, cure, f"{role} {cause} {leaf}")

    def _misfit(self, role: Role, misfit: Misfit) -> Objection:
        change = f"the file has {misfit.given} and vLLM takes it as {misfit.wanted}"
        says = f"{change}, its {misfit.param}, in silence; {_SILENCE[role]}"
        where = misfit.tensor.partition(", ")[0] or misfit.param
        return self._wrong(
            where, says, _FILES, f"{role} {change} {misfit.param.rpartition('.')[2]}"
        )

    def _no_kernel(self, role: Role, use: KernelUse) -> Objection:
        where = self._entry_of(role, use.where) or use.where
        kind, cure = use.method or use.layer, "Choose a scheme that this GPU has a kernel for"
        if "compute capability" in use.outcome:
            kind, cure = use.layer, "Serve it on another GPU: its attention needs one"
        elif found := known_failure(use.method, kinds=("failures",)):
            cure = found[0].cure
        says = (
            f"no kernel for {kind} in the {role} ({use.count}): "
            f"{use.outcome.removeprefix('refused: ')}"
        )
        return _objection("no-kernel", where, says, cure)

    def _named_in(self, failure: LoadFailure) -> str:
        """The entry of a parameter or module that vLLM's message names, else of the module that it
        built last.
        """
        for role in ROLES:
            view = self.views[role]
            if view is not None and failure.role in (role, ""):
                for name in re.findall(r"\w+(?:\.\w+)+", failure.words):
                    if found := on_disk(view, name, is_draft=role == "draft"):
                        return found
                asked = self.account.of(role)[1].asked
                if asked and failure.stage == "construct":
                    return self._entry_of(role, asked[-1].prefix)
        return ""

    def _entry_of(self, role: str, prefix: str) -> str:
        return self.traces[role].module_entry(prefix) if role in self.traces else ""

    @property
    def _config(self) -> str:
        return f"{self.account.path}/config.json"

    def _wrong(self, where: str, says: str, cure: str, cause: str = "") -> Objection:
        """With the static check's cure for the same tensor or module, or for its only error, where
        it has one.
        """
        stem = where.rpartition(".")[0] or where
        same = (
            each
            for each in self.errors
            if each.where.startswith(stem) or where.startswith(each.where)
        )
        known = next(same, self.errors[0] if len(self.errors) == 1 else None)
        return _objection(RULE, where, says, known.cure if known else cure, cause)


def _objection(
    rule: str, where: str, says: str, cure: str, cause: str = "", severity: Severity = "error"
) -> Objection:
    return objection(
        origin="dry", rule=rule, severity=severity, where=where, says=says, cure=cure, cause=cause
    )


def _said(failure: LoadFailure) -> str:
    """vLLM's message on one line, without the words that pydantic puts around it; and its place."""
    words = " ".join(failure.words.split())
    words = re.sub(r"^\d+ validation errors? for \w+ (Value error|Assertion failed), ", "", words)
    words = words.partition(" [type=")[0][:_LONGEST]
    at = f" ({failure.at})" if failure.at else ""
    return f"{failure.type}: {words}".removesuffix(": ") + at
