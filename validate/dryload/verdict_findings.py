"""Findings from a dry load: what vLLM said or did in silence, the checkpoint's entry that caused
it, and the cure.

In: a `LoadAccount`, and the `RuntimeView` of the static check where the family is known. Out: an
`Objection` for each parameter or tensor, in names on disk.

Easy to get wrong: parameters have vLLM's names, but people know names on disk. A parameter's name
is its place in the model (`model.layers.3.mtp_block.self_attn.qkv_proj`). The quantization config
and the family's table use the prefix of construction (`model.layers.3.self_attn.qkv_proj`, and
`mtp.fc` for `model.fc`). Each question to the config has both names; the two are compared to rename
the others (`Trace`). Nothing here names the GPU: check_on.py does, because one cause on several
GPUs is one finding.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from ...recipes.families import drafted_elsewhere
from ...recipes.family import HFName
from ...recipes.family_view import Place
from ...recipes.frozen import Raw
from ..check.rules_kv import is_kv_scale
from ..check.runtime_view import Module, RuntimeView
from ..facts.dry_load import (
    ROLES,
    Fault,
    LoadAccount,
    LoadedModel,
    LoadFailure,
    ModelAccount,
    Question,
    Role,
)
from ..facts.findings import Finding, Objection, errors_of, objection
from .failures import KnownFailure, known_defect, known_failure, text_of

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
    "Make config.json's ignore list and targets say what the files hold: `keepmtp explain PATH` "
    "shows what vLLM builds"
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


def objections(
    account: LoadAccount,
    runtime: RuntimeView | None,
    *,
    config: Raw,
    version: str,
    static: Iterable[Finding] = (),
    draft: RuntimeView | None = None,
) -> list[Objection]:
    """Everything that is wrong on this GPU at this TP size.

    Args:
        account: of the dry load.
        runtime: the static check's; None where the family has no table.
        draft: that of the draft, where it has a checkpoint of its own.
        config: config.json of the draft.
        version: of vLLM.
        static: findings of the static check; their cures are better than general ones.
    """
    views = {"target": runtime, "draft": draft or runtime}
    sides = [_Side(role, views[role], *account.of(role)) for role in ROLES]
    case = _Case(account, sides, config, version, errors_of(static))
    failure = account.load.failure
    found = [*case.nameless_heads()]
    if failure is None:
        return [*found, *case.silence(), *case.unused()]
    if not (found and "head" in (failure.tensor or failure.words)):
        found.append(case.failed(failure))
    return found


@dataclass(frozen=True)
class _Side:
    """The target or the draft: what was loaded, how its parameters were written, and its names."""

    role: Role
    view: RuntimeView | None
    model: LoadedModel
    written: ModelAccount

    @cached_property
    def trace(self) -> "Trace | None":
        if self.view:
            return Trace(self.written.asked, self.view)
        return None

    @cached_property
    def is_nameless(self) -> bool:
        """Whether vLLM asks about its quantized head with an empty name."""
        for asked in self.written.asked:
            is_quantized = bool(asked.method) and not asked.method.startswith("Unquantized")
            if asked.layer == "ParallelLMHead" and not asked.prefix and is_quantized:
                return True
        return False

    def entry_of(self, prefix: str) -> str:
        """The first tensor on disk of a module; "" where it is not known."""
        if self.trace:
            return self.trace.module_entry(prefix)
        return ""


@dataclass(frozen=True)
class _Case:
    """One dry load, and what is known about its checkpoint."""

    account: LoadAccount
    sides: Sequence[_Side]
    config: Raw
    version: str
    errors: Sequence[Finding]

    def nameless_heads(self) -> Iterator[Objection]:
        """A defect of vLLM: no entry of a quantization config can except a head that has no
        name.
        """
        for side in self.sides:
            words = f"nameless head of {side.model.cls}"
            if side.is_nameless and (defect := self._known(words, side.view)):
                yield self._of_vllm(defect, "lm_head.weight", _SILENCE[side.role])

    def failed(self, failure: LoadFailure) -> Objection:
        """What vLLM raised."""
        words, draft = " ".join(failure.words.split()), self.sides[1].view
        # Without the words that pydantic puts around it.
        words = _OF_PYDANTIC.sub("", words).partition(" [type=")[0][:_LONGEST]
        said = f"{failure.type}: {words}".removesuffix(": ") + f" ({failure.at})".removesuffix(
            " ()"
        )
        family, dialect, count = "", "", self._config
        if draft:
            family, count = draft.view.family.model_type, draft.view.mtp_count_key
            dialect = draft.draft_dialect.name
        known = {"family": family, "dialect": dialect, "version": self.version}
        if defect := known_defect(failure, **known):
            where = failure.tensor or self._config
            return self._of_vllm(defect, where, said)
        where, cure = "", _FILES
        if found := known_failure(text_of(failure), kinds=("dry_load", "failures")):
            where, cure = found[0].where.format(named=found[1], count=count), found[0].cure
        act = _ACTS[failure.stage].format(failure.role or "model")
        if elsewhere := drafted_elsewhere(self.config, self.version):
            model_type = self.config.get("model_type")
            says = (
                f"vLLM {self.version} has no draft for {model_type!r}; it stops while {act}: {said}"
            )
            return _objection("family", self._config, says, elsewhere, "no draft")
        where = where or failure.tensor or self._named_in(failure) or self._config
        # Line numbers and the version differ between versions that have one fault.
        cause = f"{act} {failure.type} {words}"
        return self._wrong(where, f"vLLM {self.version} stops while {act}: {said}", cure, cause)

    def silence(self) -> Iterator[Objection]:
        """What vLLM accepted without a message."""
        for side in self.sides:
            silence, trace = f"in silence; {_SILENCE[side.role]}", side.trace
            for fault in side.written.faults:
                if side.is_nameless and "head" in fault.param:
                    continue
                where, leaf = next(iter(fault.sources), fault.param), fault.param.rpartition(".")[2]
                cure = "Bring the missing tensors back from the release"
                if trace:
                    where = trace.entry(fault)
                    if _SCALE.search(leaf):
                        entry = f"re:^{re.escape(trace.module(fault.param))}"
                        cure = f"Store its scales, or if it is plain, add '{entry}' to ignore"
                what = "is filled by nothing on disk"
                if fault.num_written:
                    what = f"is filled in part only ({fault.num_written:,} of "
                    what += f"{fault.num_expected:,} elements)"
                says = f"vLLM's {fault.param} {what}, {silence}"
                cause = f"{side.role} {bool(fault.num_written)} {leaf}"
                words = f"unfilled in {side.role}: {fault.param} {what}"
                if defect := self._known(words, side.view):
                    yield self._of_vllm(defect, where)
                else:
                    yield self._wrong(where, says, cure, cause)
            for misfit in side.written.misfits:
                if side.is_nameless and "head" in misfit.param:
                    continue
                change = f"the file has {misfit.given} and vLLM takes it as {misfit.wanted}"
                where = misfit.tensor.partition(", ")[0] or misfit.param
                cause = f"{side.role} {change} {misfit.param.rpartition('.')[2]}"
                says = f"{change}, its {misfit.param}, {silence}"
                yield self._wrong(where, says, _FILES, cause)
            for use in side.model.kernels:
                if not use.outcome.startswith("refused: "):
                    continue
                kind, cure = use.method or use.layer, "Choose a scheme that it has a kernel for"
                if "compute capability" in use.outcome:
                    kind, cure = use.layer, "Serve it on another GPU: its attention needs one"
                elif found := known_failure(use.method, kinds=("failures",)):
                    cure = found[0].cure
                why = use.outcome.removeprefix("refused: ")
                says = f"no kernel for {kind} in the {side.role} ({use.count}): {why}"
                yield _objection("no-kernel", side.entry_of(use.where) or use.where, says, cure)

    def unused(self) -> Iterator[Objection]:
        """Tensors that neither target nor draft read, or not to their end."""
        target, draft = (side.view for side in self.sides)
        for name in self.account.unconsumed:
            holder, place, role = draft, None, "target"
            if target and name in target.source.entries:
                holder = target
            if holder:
                place = holder.view.place(HFName(name))
                if name.startswith(holder.view.layout.unread):
                    continue
            if _RECOMPUTED.search(name) or self._is_left_alone(place):
                continue
            if place and place.part == "mtp":
                role = "draft"
            if defect := self._known(f"unread by {role}: {name}", holder):
                yield self._of_vllm(defect, name)
            elif is_kv_scale(name.rpartition(".")[2]):
                says = f"{role}: vLLM has no parameter for this scale of the KV cache and uses 1.0"
                cure = "Nothing, unless the cache is FP8"
                yield _objection("kv-scales", name, says, cure, role, "warning")
            else:
                says = f"neither target nor draft reads it; {_SILENCE[role]} if it matters"
                yield self._wrong(name, says, _RELEASE, f"unused {role}")
        for name, used, size in self.account.truncated:
            says = f"only {used:,} of its {size:,} elements are read, in silence"
            yield self._wrong(name, says, _RELEASE, "truncated")

    def _known(self, words: str, view: RuntimeView | None) -> KnownFailure | None:
        """A defect of vLLM that raises nothing: words of our own tell of it."""
        family = view.view.family.model_type if view else "unknown"
        found = known_failure(words, kinds=("defects",), family=family, version=self.version)
        return found and found[0]

    def _of_vllm(self, defect: KnownFailure, where: str, said: str = "") -> Objection:
        """vLLM's own defect: what it does as it is, and with keepmtp's cures where they help."""
        says, cure, names = defect.says, defect.cure, ",".join(self.account.load.cures)
        if said:
            says += f"; {said}"
        if names:
            says += f"; with keepmtp's cures it loads ({names})"
            cure = f"Serve it with `keepmtp serve PATH`, or with `KEEPMTP_CURES={names} vllm serve "
            cure += f"PATH` where keepmtp is installed beside vLLM. Otherwise: {defect.cure}"
        return _objection(DEFECT, where, says, cure, f"{defect.name} {names}")

    def _is_left_alone(self, place: Place | None) -> bool:
        """A copy of what the draft takes from the target, or an MTP layer that vLLM does not
        build.
        """
        draft = self.sides[1].view
        if not (draft and place and place.part == "mtp"):
            return False
        if place.role in ("embedding", "head") and self.account.load.draft.shared:
            return True
        first, most = 0, draft.view.family.loader.most_layers(self.account.load.k)
        if not draft.view.layout.mtp:
            first = draft.view.num_layers
        return bool(most) and place.layer is not None and place.layer - first >= most

    def _named_in(self, failure: LoadFailure) -> str:
        """The entry of a parameter or module that vLLM's message names, else of the module that
        it built last.
        """
        for side in self.sides:
            if side.view is None or failure.role not in (side.role, ""):
                continue
            for name in re.findall(r"\w+(?:\.\w+)+", failure.words):
                if found := on_disk(side.view, name, is_draft=side.role == "draft"):
                    return found
            if side.written.asked and failure.stage == "construct":
                return side.entry_of(side.written.asked[-1].prefix)
        return ""

    @property
    def _config(self) -> str:
        return f"{self.account.path}/config.json"

    def _wrong(self, where: str, says: str, cure: str, cause: str = "") -> Objection:
        """With the static check's cure for the same tensor or module, or for its only error,
        where it has one.
        """
        stem = where.rpartition(".")[0] or where
        for each in self.errors:
            if len(self.errors) == 1 or each.where.startswith(stem) or where.startswith(each.where):
                cure = each.cure
                break
        return _objection(RULE, where, says, cure, cause)


# The name of an experts' parameter says which half it is.
_HALF = re.compile(r"^(w13|w2)_")
_GATE_UP = re.compile(r"\.(gate_proj|up_proj|w1|w3|gate_up_proj)$")


class Trace:
    """The way back for the target or the draft of one dry load; `questions` are those of its
    quantization config.
    """

    def __init__(self, questions: Sequence[Question], runtime: RuntimeView):
        self._asked: dict[str, str] = {}
        for asked in questions:
            if asked.path and asked.prefix:
                self._asked[asked.path] = asked.prefix
        self._runtime = runtime

    def module(self, param: str) -> str:
        """vLLM's prefix of the module that owns a parameter; the parameter's own name if it belongs
        to none.
        """
        path = param.rpartition(".")[0]
        for name in (path, param):
            for known in (name, name.replace(".routed_experts", "")):
                prefix = self._prefix(known)
                if prefix in self._runtime.view.disk_modules:
                    return prefix
        return self._prefix(path)

    def entry(self, fault: Fault) -> str:
        """The tensor on disk that a fault is about: the missing one, else the one least written,
        else the first.
        """
        leaf, half = fault.param.rpartition(".")[2], ""
        if match := _HALF.match(leaf):
            half = match[1]
        members = self._members(self.module(fault.param), half)
        if not fault.sources and (there := self._first_of(members)):
            return there
        used, leaf = tuple(f"{name}." for name in fault.sources), leaf.removeprefix(f"{half}_")
        for module in members:
            if not any(name.startswith(f"{module}.") for name in used):
                weight = self._runtime.weights.get(module)
                if module in self._runtime.source.entries:
                    return module
                if weight and leaf in weight.parts:
                    return self._first_of([module])
                return f"{module}.{leaf}"
        return min(fault.sources, key=fault.sources.__getitem__, default=fault.param)

    def module_entry(self, prefix: str) -> str:
        """The first tensor on disk of a module that vLLM calls `prefix`; "" if the table does not
        know it.
        """
        members = self._members(prefix)
        return self._first_of(members) or next(iter(members), "")

    def _members(self, prefix: str, half: str = "") -> list[HFName]:
        """Modules on disk; experts by number, as many as there are, and stacked ones only if there
        are no others.
        """
        single, others, stacked = list[HFName](), list[HFName](), list[HFName]()
        for module in self._runtime.view.disk_modules.get(prefix, ()):
            if half and bool(_GATE_UP.search(module)) != (half == "w13"):
                continue
            if "{e}" in module:
                single.append(module)
                continue
            others.append(module)
            if module in self._runtime.source.entries:
                stacked.append(module)
        if not single:
            return others
        if stacked:
            return stacked
        pattern, last = re.compile(re.escape(single[0]).replace(r"\{e\}", r"(\d+)")), 0
        for module in self._runtime.weights:
            if match := pattern.fullmatch(module):
                last = max(last, int(match[1]))
        numbered = range(last + 1)
        return [HFName(each.replace("{e}", str(e))) for e in numbered for each in single]

    def _first_of(self, modules: Sequence[HFName]) -> str:
        """The first tensor of the first of these modules that is on disk."""
        for module in modules:
            if module in self._runtime.weights:
                return next(iter(self._runtime.weights[module].parts.values())).name
        return ""

    def _prefix(self, path: str) -> str:
        """The prefix for a path in the model: its longest stem with another known prefix is
        replaced.
        """
        if path in self._asked:
            return self._asked[path]
        for stem in sorted(self._stems, key=len, reverse=True):
            if f"{path}.".startswith(f"{stem}."):
                return (self._stems[stem] + path[len(stem) :]).lstrip(".")
        return path

    @cached_property
    def _stems(self) -> Mapping[str, str]:
        """Stem of a path -> stem of its prefix, where they differ. A stem is a name without the end
        that both share.
        """
        stems: dict[str, str] = {}
        for path, prefix in self._asked.items():
            ours, theirs = path.split("."), prefix.split(".")
            while ours and theirs and ours[-1] == theirs[-1]:
                ours.pop()
                theirs.pop()
            if ours != theirs and ours:
                stems.setdefault(".".join(ours), ".".join(theirs))
        return stems


def on_disk(runtime: RuntimeView, named: str, *, is_draft: bool) -> str:
    """The tensor of the checkpoint that a name in vLLM's words means; "" where none is found.

    Loaders cut names at both ends: `layers.0.mlp.experts.w2_weight` may be the draft's or the
    target's. The draft's is meant if the words speak of it.
    """
    if HFName(named) in runtime.source.entries:
        return named
    words = named.replace(".mtp_block", "").replace(".routed_experts", "").split(".")
    for end in range(len(words), 1, -1):
        wanted = f".{'.'.join(words[:end])}"
        found = list[Module]()
        for module in runtime.modules:
            if wanted.endswith(f".{module.name}") or module.name.endswith(wanted):
                found.append(module)
        if found:
            best = min(found, key=lambda module: (module.part == "mtp") != is_draft)
            return next(iter(best.members[0].weight.parts.values())).name
    return ""
