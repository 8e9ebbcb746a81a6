"""A dry load's verdict as findings: what vLLM said or left unsaid, the checkpoint's entry that caused it, and the cure.

In: a `Verdict`, and where the family is known the `Evidence` of the static check. Out: `Finding`s in names on disk.

Easy to get wrong: parameters have vLLM's names, people have files. A parameter is traced back to the tensors that the
family's table places in its module; where that fails, the parameter's own name is told.
"""

import re
from collections.abc import Iterable, Iterator

from ..recipes.family import HFName, Place
from .defects import known_defect
from .dry import Failure, Fault, Misfit, Side, Verdict
from .evidence import Evidence, Module
from .findings import Finding

RULE = "dry-load"
# Written by vLLM's own loaders into parameters that its modules do not register under the module's name.
_INSERTED = re.compile(r"\.(mtp_block|routed_experts|transformer_layer)(?=\.)")
# Buffers that vLLM computes anew, so that its loaders pass over them.
_RECOMPUTED = re.compile(r"\.rotary_emb\.(inv_freq|cos_cached|sin_cached)$")
_SCALE = re.compile(r"scale(_inv|_2)?$|zero_point$|_shape$")
_LONGEST = 400
_SILENCE = {"target": "answers are garbage", "draft": "the draft guesses, acceptance is near 0 %"}

# What vLLM 0.32.0 says -> what to do; the first that matches "<exception>: <message>".
_CURES: tuple[tuple[str, str], ...] = (
    (r"weight_packed|weight_scale|w13_|w2_|weight_scale_inv|There is no module or parameter named",
     "Make config.json's ignore list and targets say what the files hold, in vLLM's runtime names"),
    (r"MTP speculative decoding layer \d+ weights missing|not initialized from checkpoint",
     "Bring the MTP tensors back from the release: `keepmtp quantize` keeps them"),
    (r"not divisible by weight quantization block|is not divisible by|output_partition_size|input_size_per_partition",
     "Serve with a smaller --tensor-parallel-size, or keep this module in BF16"),
    (r"num_speculative_tokens:?\s*\d+ must be divisible|n_predict", "Choose -k as a multiple of the MTP layers"),
    (r"ZeroDivisionError|num_nextn_predict_layers|mtp_num_hidden_layers",
     "Let config.json count the MTP layers, as the release does"),
    (r"different quantization schemes|some but not all shards|All MoE projections need",
     "Give all parts of the fused module the same scheme, or ignore all of them"),
    (r"[Ff]ailed to find a kernel|No .* backend|Unsupported .* backend",
     "Choose a scheme that this GPU has a kernel for"),
    (r"doesn't match the broadcast shape|size mismatch|shape|AssertionError",
     "Compare dtype and shape of the tensor with what config.json promises for its module"),
    (r"KeyError|ValueError", "Rename or remove the tensor, or take the release's config.json"),
)  # fmt: skip


def findings(
    verdict: Verdict, evidence: Evidence | None, *, version: str, static: Iterable[Finding] = ()
) -> list[Finding]:
    """Everything that is wrong on this GPU at this TP size.

    Args:
        verdict: of the dry load.
        evidence: the static check's; None where the family has no table.
        version: of vLLM.
        static: what the static check found: its cure is better than a general one.
    """
    if verdict.failure is not None:
        return [_failure(verdict, evidence, version, tuple(static))]
    found: list[Finding] = []
    for role, side in (("target", verdict.target), ("draft", verdict.draft)):
        found += _faults(verdict, evidence, role, side)
        found += _kernels(verdict, role, side)
    return found + list(_unused(verdict, evidence))


def _failure(verdict: Verdict, evidence: Evidence | None, version: str, static: tuple[Finding, ...]) -> Finding:
    failure = verdict.failure
    assert failure is not None
    part = f"the {failure.role}" if failure.role else "the model"
    act = {"config": "reading the config", "construct": f"building {part}", "load": f"loading {part}",
           "share": "giving the draft the target's embedding and head", "process": f"preparing the weights of {part}",
           "world": "starting", "crash": "judging"}[failure.stage]  # fmt: skip
    words = _said(failure)
    where = failure.tensor or _named_in(failure.words, evidence) or f"{verdict.path}/config.json"
    family = evidence.view.family.model_type if evidence else ""
    if defect := known_defect(failure, family=family, version=version):
        says = f"a defect of vLLM {version}, not of this checkpoint: {defect.says}; {words} ({failure.at})"
        return Finding(rule="vllm-defect", severity="error", where=where, says=_on(verdict, says), cure=defect.cure)
    says = f"vLLM {version} stops while {act}: {words}" + (f" ({failure.at})" if failure.at else "")
    cure = _cure_of(where, static) or next((cure for words_, cure in _CURES if re.search(words_, words)), "")
    return Finding(
        rule=RULE, severity="error", where=where, says=_on(verdict, says),
        cure=cure or "Read vLLM's message; `keepmtp check` without --gpu may say more",
    )  # fmt: skip


def _said(failure: Failure) -> str:
    """vLLM's message on one line; pydantic's frame around it says nothing about the checkpoint."""
    words = " ".join(failure.words.split())
    words = re.sub(r"^\d+ validation errors? for \w+ (Value error|Assertion failed), ", "", words)
    words = words.partition(" [type=")[0]
    return f"{failure.type}: {words[:_LONGEST]}" if words else failure.type


def _named_in(words: str, evidence: Evidence | None) -> str:
    """The entry on disk of a parameter or module that vLLM's message names."""
    for name in re.findall(r"[\w]+(?:\.[\w]+)+", words):
        if evidence is not None and (module := _module_of(name, evidence)):
            return _entry_of(module)
    return ""


def _faults(verdict: Verdict, evidence: Evidence | None, role: str, side: Side) -> Iterator[Finding]:
    for fault in side.unwritten:
        yield _fault(verdict, evidence, role, fault, "stays uninitialised memory: nothing on disk fills it")
    for fault in side.default:
        yield _fault(verdict, evidence, role, fault, "keeps its placeholder: nothing on disk fills it")
    for fault in side.partial:
        share = f"{fault.num_written:,} of {fault.num_expected:,} elements"
        yield _fault(verdict, evidence, role, fault, f"is filled in part only ({share})")
    for misfit in side.casts:
        yield _misfit(verdict, role, misfit, f"holds {misfit.given}, which is cast into {misfit.wanted}")
    for misfit in side.broadcasts:
        yield _misfit(verdict, role, misfit, f"has shape {misfit.given}, which is spread over {misfit.wanted}")


def _fault(verdict: Verdict, evidence: Evidence | None, role: str, fault: Fault, what: str) -> Finding:
    module = _module_of(fault.param, evidence) if evidence else None
    where = fault.tensor or (_entry_of(module) if module else fault.param)
    is_scale = _SCALE.search(fault.param) is not None
    if is_scale and module is not None:
        entry = f"re:^{re.escape(module.name)}"
        cure = f"Store its scales, or if its weights are plain, add '{entry}' to ignore"
    else:
        cure = "Bring the missing tensors back from the release"
    says = f"vLLM's {fault.param} {what}, in silence; {_SILENCE[role]}"
    return Finding(
        rule=RULE, severity="error", where=where, says=_on(verdict, says), cure=cure,
        cause=f"{role} {what.split('(')[0]} {fault.param.rpartition('.')[2]}",
    )  # fmt: skip


def _misfit(verdict: Verdict, role: str, misfit: Misfit, what: str) -> Finding:
    return Finding(
        rule=RULE, severity="error", where=misfit.tensor.partition(", ")[0] or misfit.param,
        says=_on(verdict, f"{what} of vLLM's {misfit.param}, in silence; {_SILENCE[role]}"),
        cure="Make config.json's ignore list and targets say what the files hold",
        cause=f"{role} {what} {misfit.param.rpartition('.')[2]}",
    )  # fmt: skip


def _kernels(verdict: Verdict, role: str, side: Side) -> Iterator[Finding]:
    for kernel in side.kernels:
        if kernel.outcome.startswith("refused: "):
            yield Finding(
                rule="no-kernel", severity="error", where=kernel.where, count=kernel.count,
                says=_on(verdict, f"no kernel for {kernel.method} in the {role}: {kernel.outcome[9:]}"),
                cure="Choose a scheme that this GPU has a kernel for",
            )  # fmt: skip


def _unused(verdict: Verdict, evidence: Evidence | None) -> Iterator[Finding]:
    for name in verdict.unconsumed:
        place = evidence.view.place(HFName(name)) if evidence else None
        is_mtp = place is not None and place.part == "mtp"
        if _RECOMPUTED.search(name) or (evidence and place and is_mtp and _is_left_alone(verdict, evidence, place)):
            continue
        role = "draft" if is_mtp else "target"
        yield Finding(
            rule=RULE, severity="error", where=name,
            says=_on(verdict, f"neither target nor draft reads it, in silence; {_SILENCE[role]} if it matters"),
            cure="Compare its name with the release's: vLLM knows it under another, or not at all",
            cause=f"unused {role}",
        )  # fmt: skip
    for name, used, size in verdict.truncated:
        yield Finding(
            rule=RULE, severity="error", where=name, cause="truncated",
            says=_on(verdict, f"only {used:,} of its {size:,} elements are read, in silence"),
            cure="Compare its shape with the release's and with config.json",
        )  # fmt: skip


def _is_left_alone(verdict: Verdict, evidence: Evidence, place: Place) -> bool:
    """A copy of what the draft takes from the target, or an MTP layer beyond those that vLLM reads at all."""
    num_used = evidence.view.family.loader.num_layers_used
    first = 0 if evidence.view.layout.mtp else evidence.view.num_layers
    is_beyond = bool(num_used) and place.layer is not None and place.layer - first >= num_used
    return is_beyond or (place.role in ("embedding", "head") and bool(verdict.draft.shared))


def _on(verdict: Verdict, says: str) -> str:
    return f"on {verdict.gpu} at TP {verdict.tp}: {says}"


def _cure_of(where: str, static: tuple[Finding, ...]) -> str:
    """The static check's cure for the same tensor or module, else of its only error."""
    errors = [finding for finding in static if finding.severity == "error"]
    stem = where.rpartition(".")[0] or where
    for finding in errors:
        if finding.where.startswith(stem) or where.startswith(finding.where):
            return finding.cure
    return errors[0].cure if len(errors) == 1 else ""


def _module_of(param: str, evidence: Evidence) -> Module | None:
    """The runtime module that a parameter, or a module named in a message, belongs to."""
    plain = _INSERTED.sub("", param)
    return evidence.module_by_name.get(plain) or evidence.module_by_name.get(plain.rpartition(".")[0])


def _entry_of(module: Module) -> str:
    """The first tensor on disk of a module."""
    first = module.members[0].weight
    return next(iter(entry.name for entry in first.parts.values()), first.module)
