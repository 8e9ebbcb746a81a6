"""`keepmtp check`: will vLLM load this checkpoint with method=mtp, and will the draft be real? From headers alone.

In: a folder or Hub id, ours or not: compressed-tensors, modelopt or native FP8. Out: a `Report`. Nothing is downloaded
but JSON files and safetensors headers, and vLLM is not needed.

Easy to get wrong: a checkpoint that loads can still draft at 0 %. A finding is an error where vLLM 0.32 raises, and
where it stays silent but holds something else than the files; what only older versions or other engines mind is a
warning.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

from ...checkpoints.source import Source, open_source
from ...recipes.errors import CheckpointError, RecipeError
from ...recipes.families import find_view
from . import rules_config, rules_forms, rules_mtp, rules_source
from .findings import Facts, Finding, Report, grouped
from .runtime_view import Evidence

Rule = Callable[[Evidence], Iterator[Finding]]
RULES: tuple[Rule, ...] = (*rules_mtp.RULES, *rules_forms.RULES, *rules_config.RULES)
SOURCE_RULES = rules_source.RULES


def check(where: str | Path, *, source: Source | None = None) -> Report:
    """Judge one checkpoint.

    Args:
        where: a folder or a Hub id.
        source: the release it was made from; kept MTP tensors are then compared with it.

    Returns: the report; a checkpoint that cannot be opened at all is one finding.
    """
    return examine(where, source=source)[0]


def examine(where: str | Path, *, source: Source | None = None) -> tuple[Report, Source | None, Evidence | None]:
    """`check`, with the headers (None where they cannot be read) and the evidence (None for an unknown family)."""
    try:
        opened = open_source(where)
    except CheckpointError as error:
        return _refused(str(where), "files", str(error)), None, None
    report, evidence = _judge(opened, source)
    return report, opened, evidence


def check_source(opened: Source, *, source: Source | None = None) -> Report:
    """`check` for a checkpoint whose headers are already read."""
    return _judge(opened, source)[0]


def _judge(opened: Source, source: Source | None) -> tuple[Report, Evidence | None]:
    try:
        view = find_view(opened.config, opened.where)
        for number in (view.num_layers, view.num_mtp_layers):
            if number < 0:
                raise ValueError(number)
    except RecipeError as error:
        return _refused(opened.where, "family", str(error)), None
    except (KeyError, TypeError, ValueError) as error:
        message = f"{opened.where}/config.json: must count its layers; got {error!r}. Take the original's config.json."
        return _refused(opened.where, "config", message), None
    evidence = Evidence(source=opened, view=view)
    findings = [finding for rule in RULES for finding in rule(evidence)]
    if source is not None:
        original = Evidence(source=source, view=find_view(source.config, source.where))
        findings += [finding for rule in SOURCE_RULES for finding in rule(evidence, original)]
    return Report(path=opened.where, findings=grouped(findings), facts=_facts(evidence)), evidence


def _refused(path: str, rule: str, message: str) -> Report:
    where, _, rest = message.partition(": ")
    says, _, cure = rest.partition(". ")
    return Report(
        path=path, findings=(Finding(rule=rule, severity="error", where=where, says=says, cure=cure),), facts=Facts()
    )


def _facts(evidence: Evidence) -> Facts:
    entries = evidence.source.entries
    mtp = [module for module in evidence.modules if module.part == "mtp"]
    forms = {member.weight.form for module in mtp for member in module.members if len(member.weight.shape) >= 2}
    return Facts(
        family=evidence.view.family.model_type,
        dialect=evidence.dialect.name,
        num_tensors=len(entries),
        num_bytes=sum(entry.num_bytes for entry in entries.values()),
        num_mtp_tensors=_count_mtp(evidence),
        num_mtp_layers=len(evidence.found),
        mtp_forms=tuple(sorted(forms)),
    )


def _count_mtp(evidence: Evidence) -> int:
    weights = sum(
        len(weight.parts)
        for module, weight in evidence.weights.items()
        if (place := evidence.placed.get(module)) and place.part == "mtp"
    )
    others = sum(1 for entry in evidence.others if (place := evidence.placed.get(entry.name)) and place.part == "mtp")
    return weights + others
