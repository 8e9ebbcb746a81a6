"""A target with a draft that has a checkpoint of its own: what vLLM builds of the two.

In: the target's check, and the draft's. Out: one check, with the findings of both.

Easy to get wrong: whose quantization config. Most draft classes read the target's, also for modules
that only the draft has (`vllm_config.quant_config`; vLLM 0.32 and 0.33, glm4_moe_mtp.py); some read
their own (`get_draft_quant_config`). So a draft that is good alone can be one that its target's
config builds otherwise. And the target's own block, if it has one, is not read.
"""

import shlex
from collections.abc import Iterator
from dataclasses import replace

from ...checkpoints.companions import HF_QUANT_CONFIG
from ...checkpoints.dialects.choose import without_quantization
from ...checkpoints.dialects.compressed_tensors import CompressedTensors
from ...checkpoints.dialects.fp8 import has_blocks
from ...checkpoints.dialects.modelopt import ModelOpt
from ...checkpoints.dialects.runtime_view import RuntimeView
from ...recipes.conventions import FORMATS
from ...recipes.errors import RecipeError
from ...recipes.frozen import Json
from ...recipes.runtimes.vllm import NEWEST
from ...recipes.schemes import SCHEMES
from ..facts.findings import Finding, Objection, Objections, grouped, objection
from ..facts.served import TargetFact
from .check import Checked, examine, facts_of
from .rules_forms import draft_head_is_excluded, schemes_are_known, stored_form_is_what_is_built
from .rules_mtp import ALONE

_SAME = ("hidden_size", "vocab_size", "num_hidden_layers")


def opened_draft(draft: str, *, vllm: str = NEWEST) -> Checked:
    """The check of a draft that somebody names.

    Raises:
        KeepMTPError: there is nothing to judge.
    """
    checked = examine(draft, vllm=vllm)
    if checked.refusal is not None:
        raise checked.refusal.at("--draft")
    return checked


def with_draft(target: Checked, draft: Checked) -> Checked:
    """The target's check, with what is found of the draft."""
    findings = list[Finding]()
    for finding in target.data.findings:
        if finding.rule != "family" and not _is_of_block(target, finding):
            findings.append(finding)
    findings += of_draft(draft, target.runtime)
    return target.with_findings(*findings)._replace(draft=draft.runtime)


def as_of_draft(pair: Checked, target: TargetFact | None) -> Checked:
    """The check of a target with its draft, as one of the draft: its own facts, and the findings
    and dry loads of both.

    Raises:
        KeepMTPError: the target cannot be read, or no family has the draft's model_type.
    """
    where = pair.readable().where
    if pair.draft is None:
        rule = "a draft that is recorded has a family's table"
        raise RecipeError(f"the draft of {where}", rule, got="none", cure="Leave --record out")
    source = pair.draft.source
    changed = {"path": source.where, "facts": facts_of(pair.draft), "target": target}
    return pair._replace(data=pair.data.model_copy(update=changed), source=source)


def of_draft(draft: Checked, target: RuntimeView | None) -> list[Finding]:
    """What is found of a draft that is served with a target; None: nobody knows that one."""
    findings = [finding for finding in draft.data.findings if finding.rule != ALONE]
    # A config without decoder layers says nothing of its target's.
    if target is not None and draft.runtime is not None and draft.runtime.view.num_layers:
        known = {(finding.rule, finding.where) for finding in findings}
        for finding in grouped(_objections(target, draft.runtime)):
            if (finding.rule, finding.where) not in known:
                findings.append(finding)
    return findings


def _is_of_block(target: Checked, finding: Finding) -> bool:
    """Whether it is about the target's own block, which is not read."""
    runtime = target.runtime
    if finding.rule.startswith("mtp-"):
        return True
    return runtime is not None and runtime.is_mtp_name(finding.where)


def _objections(target: RuntimeView, draft: RuntimeView) -> Iterator[Objection]:
    view = draft.view
    where = f"{draft.source.where}/config.json"
    cure = "Make the draft from this target, or from what the target was made from"
    theirs = _sizes(draft)
    for key, value in _sizes(target).items():
        if theirs[key] != value:
            says = f"is {theirs[key]}, and {value} in the target: vLLM cannot join the two"
            yield objection("pair", f"{where}: {key}", says, cure)
    yield from _embedding(draft)
    if not view.layout.draft_reads_afresh:
        yield from _as_the_target_builds(target, draft)


def _sizes(runtime: RuntimeView) -> Json:
    sizes = {key: runtime.view.text_config.get(key) for key in _SAME}
    return {"family": runtime.view.family.model_type, **sizes}


def _embedding(draft: RuntimeView) -> Objections:
    """What the draft embeds with is in its files."""
    roles = {place.role for place in draft.placed.values()}
    if "embedding" in roles:
        return
    names = [row.path for row in draft.view.layout.top if row.role == "embedding"]
    own = [row for row in draft.view.layout.mtp_top if row.role == "embedding"]
    severity = "warning"
    says = "is in no file of the draft: with several pipeline stages vLLM never fills its embedding"
    if own:
        severity = "error"
        names = [own[0].path]
        says = "is in no file of the draft, which keeps an embedding of its own: nothing fills it"
    cure = "Make the draft again with `keepmtp quantize MODEL --draft-for TARGET`"
    yield objection("draft-embedding", f"{names[0]}.weight", says, cure, severity=severity)


def _as_the_target_builds(target: RuntimeView, draft: RuntimeView) -> Objections:
    """The draft's weights have the form that the target's quantization config builds."""
    config = without_quantization(draft.source.config)
    if target.given.raw:
        config["quantization_config"] = target.given.raw
    source = replace(draft.source, config=config, changed={HF_QUANT_CONFIG: None})
    built = RuntimeView(source, draft.view, vllm=draft.vllm)
    cure = f"Make the draft in the form that {target.source.where} builds"
    words = {*_words(built)}
    if len(words) == 1 and "" not in words:
        cure += f": --mtp {min(words)}"
    elif target.given.raw and built.dialect.name not in FORMATS and not has_blocks(built.dialect):
        cure += f", in the dialect {built.dialect.name}, which keepmtp does not write"
    for word in words & SCHEMES.keys():
        if SCHEMES[word].needs_calibration:
            where = shlex.quote(target.source.where)
            cure = f"{word} needs batches, which a block alone has not. Put the block into the "
            cure += f"target: `keepmtp fix {where} --from RELEASE --out NEW`"
    for rule in (stored_form_is_what_is_built, draft_head_is_excluded, schemes_are_known):
        for each in rule(built):
            says = f"{each.finding.says}; the draft reads the target's quantization config"
            changed = {"rule": "draft-form", "says": says, "cure": cure, "cured_by": "none"}
            yield each._replace(finding=each.finding.model_copy(update=changed))


def _words(built: RuntimeView) -> Iterator[str]:
    """The scheme of each of the block's modules that may have one."""
    dialect = built.dialect
    for module in built.modules:
        if module.part != "mtp" or module.members[0].place.row.why_kept:
            continue
        if module.resolution.built.form == "plain":
            yield "bf16"
        elif has_blocks(dialect):
            yield "FP8_BLOCK"
        elif isinstance(dialect, CompressedTensors | ModelOpt):
            yield dialect.scheme_of(module.resolution)
