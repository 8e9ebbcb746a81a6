"""Findings from a dry load: what vLLM said or did in silence, the checkpoint's entry that caused
it, and the cure.

In: a `LoadAccount`, and the `RuntimeView` of the static check where the family is known. Out: an
`Objection` for each parameter or tensor, in names on disk.

Easy to get wrong: parameters have vLLM's names, but people know names on disk (trace.py). Nothing
here names the GPU: check_on.py does, because one cause on several GPUs is one finding.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial

from ...checkpoints.dialects.runtime_view import RuntimeView
from ...recipes.families import drafted_elsewhere
from ...recipes.family import HFName
from ...recipes.family_view import Place
from ..check.check import Checked
from ..check.rules_kv import is_kv_scale
from ..facts.dry_load import (
    ROLES,
    Fault,
    KernelUse,
    LoadAccount,
    LoadedModel,
    LoadFailure,
    Misfit,
    ModelAccount,
    Role,
)
from ..facts.findings import Objection, errors_of, objection
from .failures import Defect, Silence, known_defect, known_failure, silent_defect, text_of
from .trace import Trace, on_disk

_objection = partial(objection, origin="dry")
RULE = "dry-load"
DEFECT = "vllm-defect"
# Buffers that vLLM computes itself, and GPTQ's order of inputs, which it refuses where it is not
# the natural one: its loaders skip both (quantization/base_config.py,
# get_checkpoint_weight_mapper).
_RECOMPUTED = re.compile(r"\.rotary_emb\.(inv_freq|cos_cached|sin_cached)$|\.g_idx$")
_SCALE = re.compile(r"scale(_inv|_2)?$|zero_point$")
_OF_PYDANTIC = re.compile(r"^\d+ validation errors? for \w+ (Value error|Assertion failed), ")
_LONGEST = 400
_SILENCE = {"target": "answers are garbage", "draft": "the draft guesses, acceptance is near 0 %"}
_FILES = (
    "Make config.json's ignore list and targets say what the files hold: "
    "`keepmtp check PATH --modules` shows what vLLM builds"
)
_RELEASE = (
    "Compare its name and shape with the release's: vLLM knows it under another name, or not at all"
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


def objections(account: LoadAccount, checked: Checked) -> list[Objection]:
    """Everything that is wrong on this GPU at this TP size.

    Args:
        account: of the dry load.
        checked: the static check; its cures are better than general ones.
    """
    case = _Case(account, checked)
    failure = account.load.failure
    objected = [*case.nameless_heads()]
    if failure is None:
        return [*objected, *case.silence(), *case.unused()]
    # A head without a name is why vLLM raises over the head.
    if not objected or "head" not in (failure.tensor or failure.words):
        objected.append(case.failed(failure))
    return objected


def defect_of(account: LoadAccount, checked: Checked) -> Defect | None:
    """vLLM's own defect that caused the failure of a dry load."""
    draft = checked.draft or checked.runtime
    family = dialect = ""
    if account.load.failure is None:
        return None
    if draft:
        family = draft.view.family.model_type
        dialect = draft.draft_dialect.name
    version = account.load.vllm
    return known_defect(account.load.failure, family=family, dialect=dialect, version=version)


@dataclass(frozen=True)
class _Side:
    """The target or the draft: what was loaded, how its parameters were written, and its names."""

    role: Role
    view: RuntimeView | None
    model: LoadedModel
    written: ModelAccount

    @cached_property
    def trace(self) -> Trace | None:
        return self.view and Trace(self.written.asked, self.view)

    @cached_property
    def is_nameless(self) -> bool:
        """Whether vLLM asks about its quantized head with an empty name."""
        heads = [asked for asked in self.written.asked if asked.layer == "ParallelLMHead"]
        # A plain head is right also without a name.
        methods = [asked.method for asked in heads if not asked.prefix]
        return any(method and not method.startswith("Unquantized") for method in methods)

    def is_explained(self, param: str) -> bool:
        """Whether a parameter is wrong for the reason that `nameless_heads` gives."""
        return self.is_nameless and "head" in param

    def entry_of(self, prefix: str) -> str:
        """The first tensor on disk of a module; "" where it is not known."""
        return on_disk(self.view, prefix, is_draft=self.role == "draft") if self.view else ""


@dataclass(frozen=True)
class _Case:
    """One dry load, and what is known about its checkpoint."""

    account: LoadAccount
    checked: Checked

    @cached_property
    def draft(self) -> RuntimeView | None:
        return self.checked.draft or self.checked.runtime

    @cached_property
    def sides(self) -> list[_Side]:
        views = {"target": self.checked.runtime, "draft": self.draft}
        return [_Side(role, views[role], *self.account.of(role)) for role in ROLES]

    def nameless_heads(self) -> Iterator[Objection]:
        """A defect of vLLM: no entry of a quantization config can except a head that has no
        name.
        """
        for side in self.sides:
            if side.is_nameless:
                head = Silence(kind="nameless head", role=side.role, name=side.model.cls)
                defect = self._defect_in(head, side.view)
                if defect:
                    yield self._of_vllm(defect, "lm_head.weight", _SILENCE[side.role])

    def failed(self, failure: LoadFailure) -> Objection:
        """What vLLM raised."""
        # Without the words that pydantic puts around it.
        words = _OF_PYDANTIC.sub("", " ".join(failure.words.split()))
        words = words.partition(" [type=")[0][:_LONGEST]
        said = f"{failure.type}: {words}".removesuffix(": ")
        if failure.at:
            said += f" ({failure.at})"
        config = f"{self.account.path}/config.json"
        defect = defect_of(self.account, self.checked)
        if defect:
            return self._of_vllm(defect, failure.tensor or config, said)
        act = _ACTS[failure.stage].format(failure.role or "model")
        version = self.account.load.vllm
        # No fault of the checkpoint: another version, or another method, drafts for it.
        elsewhere = drafted_elsewhere(self.checked.config, version)
        if elsewhere:
            says = (
                f"vLLM {version} has no draft for {self.checked.config.get('model_type')!r}; it "
                f"stops while {act}: {said}"
            )
            return _objection("family", config, says, elsewhere, "no draft")
        where = ""
        cure = _FILES
        known = known_failure(text_of(failure))
        if known:
            where = known.where
            cure = known.cure
        where = where or failure.tensor or self._named_in(failure) or config
        # Line numbers and the version differ between versions that have one fault.
        cause = f"{act} {failure.type} {words}"
        return self._wrong(where, f"vLLM {version} stops while {act}: {said}", cure, cause)

    def silence(self) -> Iterator[Objection]:
        """What vLLM accepted without a message."""
        for side in self.sides:
            for fault in side.written.faults:
                if not side.is_explained(fault.param):
                    yield self._unfilled(side, fault)
            for misfit in side.written.misfits:
                if not side.is_explained(misfit.param):
                    yield self._misfitted(side, misfit)
            for use in side.model.kernels:
                if use.refused:
                    yield self._without_kernel(side, use)

    def _unfilled(self, side: _Side, fault: Fault) -> Objection:
        """A parameter that the files do not fill."""
        leaf = fault.param.rpartition(".")[2]
        where = next(iter(fault.sources), fault.param)
        cure = "Bring the missing tensors back from the release"
        if side.trace:
            where = side.trace.entry(fault)
            # A scale alone is missing where a plain weight was built as a packed one.
            if _SCALE.search(leaf):
                entry = f"re:^{re.escape(side.trace.module(fault.param))}"
                cure = f"Store its scales, or if it is plain, add '{entry}' to ignore"
        elements = (fault.num_written, fault.num_expected)
        silence = Silence(kind="unfilled", role=side.role, name=fault.param, elements=elements)
        defect = self._defect_in(silence, side.view)
        if defect:
            return self._of_vllm(defect, where)
        what = "is filled by nothing on disk"
        if fault.num_written:
            what = (
                f"is filled in part only ({fault.num_written:,} of {fault.num_expected:,} elements)"
            )
        return self._wrong(
            where,
            f"vLLM's {fault.param} {what}, in silence; {_SILENCE[side.role]}",
            cure,
            f"{side.role} {bool(fault.num_written)} {leaf}",
        )

    def _misfitted(self, side: _Side, misfit: Misfit) -> Objection:
        """A parameter that took other numbers than the file has."""
        change = f"the file has {misfit.given} and vLLM takes it as {misfit.wanted}"
        return self._wrong(
            misfit.tensor.partition(", ")[0] or misfit.param,
            f"{change}, its {misfit.param}, in silence; {_SILENCE[side.role]}",
            _FILES,
            f"{side.role} {change} {misfit.param.rpartition('.')[2]}",
        )

    def _without_kernel(self, side: _Side, use: KernelUse) -> Objection:
        """Layers that nothing on this GPU computes."""
        kind = use.method or use.layer
        cure = "Choose a scheme that it has a kernel for"
        known = known_failure(use.method)
        if use.lacks_gpu:
            kind = use.layer
            cure = "Serve it on another GPU: its attention needs one"
        elif known:
            cure = known.cure
        says = f"no kernel for {kind} in the {side.role} ({use.count}): {use.refused}"
        return _objection("no-kernel", side.entry_of(use.where) or use.where, says, cure)

    def unused(self) -> Iterator[Objection]:
        """Tensors that neither target nor draft read, or not to their end."""
        target = self.checked.runtime
        for name in self.account.unconsumed:
            holder = self.draft
            if target and name in target.source.entries:
                holder = target
            place = None
            is_dropped = _RECOMPUTED.search(name) is not None
            if holder is not None:
                place = holder.view.place(HFName(name))
                # Parts that vLLM drops on purpose.
                is_dropped |= name.startswith(holder.view.layout.unread)
            if not (is_dropped or self._is_left_alone(place)):
                yield self._unread(name, place, holder)
        for name, used, size in self.account.truncated:
            says = f"only {used:,} of its {size:,} elements are read, in silence"
            yield self._wrong(name, says, _RELEASE, "truncated")

    def _unread(self, name: str, place: Place | None, holder: RuntimeView | None) -> Objection:
        """A tensor that nothing read."""
        role = "target"
        if place and place.part == "mtp":
            role = "draft"
        defect = self._defect_in(Silence(kind="unread", role=role, name=name), holder)
        if defect:
            return self._of_vllm(defect, name)
        if is_kv_scale(name):
            says = f"{role}: vLLM has no parameter for this scale of the KV cache and uses 1.0"
            cure = "Nothing, unless the cache is FP8"
            return _objection("kv-scales", name, says, cure, role, "warning")
        says = f"neither target nor draft reads it; {_SILENCE[role]} if it matters"
        return self._wrong(name, says, _RELEASE, f"unused {role}")

    def _defect_in(self, silence: Silence, view: RuntimeView | None) -> Defect | None:
        family = "unknown"
        if view is not None:
            family = view.view.family.model_type
        return silent_defect(silence, family=family, version=self.account.load.vllm)

    def _of_vllm(self, defect: Defect, where: str, said: str = "") -> Objection:
        """vLLM's own defect: what it does as it is, and with keepmtp's cures where they help."""
        says = defect.says
        cure = defect.cure
        names = ",".join(self.account.load.cures)
        if said:
            says += f"; {said}"
        if names:
            says += f"; with keepmtp's cures it loads ({names})"
            cure = (
                f"Serve it with `keepmtp serve PATH`, or with `KEEPMTP_CURES={names} vllm serve "
                f"PATH` where keepmtp is installed beside vLLM. Otherwise: {defect.cure}"
            )
        return _objection(DEFECT, where, says, cure, f"{defect.name} {names}")

    def _is_left_alone(self, place: Place | None) -> bool:
        """A copy of what the draft takes from the target, or an MTP layer that vLLM does not
        build.
        """
        if self.draft is None or place is None or place.part != "mtp":
            return False
        if place.role in ("embedding", "head") and self.account.load.draft.shared:
            return True
        most = self.draft.view.family.loader.most_layers(self.account.load.k)
        if not most or place.layer is None:
            return False
        return place.layer - self.draft.view.first_mtp_index >= most

    def _named_in(self, failure: LoadFailure) -> str:
        """The entry of a parameter or module that vLLM's message names, else of the module that
        it built last.
        """
        for side in self.sides:
            if side.view is None or failure.role not in (side.role, ""):
                continue
            # Every name with a dot may be a parameter's; file names and classes are on no disk.
            for name in re.findall(r"\w+(?:\.\w+)+", failure.words):
                entry = on_disk(side.view, name, is_draft=side.role == "draft")
                if entry:
                    return entry
            if side.written.asked and failure.stage == "construct":
                return side.entry_of(side.written.asked[-1].prefix)
        return ""

    def _wrong(self, where: str, says: str, cure: str, cause: str) -> Objection:
        """With the static check's cure for the same tensor or module, or for its only error,
        where it has one.
        """
        module = where.rpartition(".")[0] or where
        errors = errors_of(self.checked.data.findings)
        for error in errors:
            is_of_it = error.where.startswith(module) or where.startswith(error.where)
            if is_of_it or len(errors) == 1:
                kind = error.cured_by
                return _objection(RULE, where, says, error.cure, cause, cured_by=kind)
        return _objection(RULE, where, says, cure, cause)
