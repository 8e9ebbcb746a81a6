"""`keepmtp check --gpu`: the static check, then vLLM's own classes and loaders on a GPU that is not
there.

In: checkpoints, vLLMs, pretended GPUs, TP sizes, a number of drafts. Out: a `Checked` for each
checkpoint, with what both found. vLLM's processes start first: they import while the headers are
read.

Easy to get wrong: a checkpoint with findings is loaded all the same, because people search for
vLLM's own words. Only a checkpoint whose files cannot be read is not loaded. A model that never had
an MTP block is loaded without a draft. And rules that were read from one vLLM say little of
another: where none of those that loaded it is known, the dry load decides.
"""

import shlex
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace

from ...checkpoints.dialects.runtime_view import RuntimeView
from ...quantize.needs.memory import free_host_bytes
from ...recipes.errors import RecipeError, VLLMError
from ...recipes.families import has_dspark
from ...recipes.frozen import Raw, Say, silent
from ...recipes.runtimes import Runtime
from ...recipes.runtimes.vllm import KNOWN, is_known, parsed
from ..check.check import VLLM_ALONE, Checked, examine
from ..facts.dry_load import (
    GPU,
    DryLoad,
    LoadAccount,
    by_whom,
    listed,
    places,
)
from ..facts.findings import Finding, Objection, by_cause, errors_first, errors_of
from ..facts.vllm_env import VLLM
from .failures import cures_in_vllm, known_defect
from .loader import DryLoader, Job, headers_of
from .verdict_findings import DEFECT, objections

_PROCESS_BYTES = 2 << 30
"""Of a vLLM that is kept, with the checkpoint that it loads; 0.6 and 0.5 GiB for a small one."""
Case = tuple[Job, Checked, RuntimeView | None]
"""What is loaded, its static check, and the runtime of a draft's own checkpoint."""


def check_on(
    paths: Sequence[str],
    *,
    vllms: Sequence[VLLM],
    gpus: Sequence[GPU],
    tps: Sequence[int] = (1,),
    num_drafts: int = 1,
    draft: str = "",
    runtimes: Sequence[Runtime] = VLLM_ALONE,
    progress: Say = silent,
) -> Iterator[Checked]:
    """Check and load checkpoints, one after the other, on every GPU at every TP size.

    Args:
        paths: folders or Hub ids.
        vllms: the versions that load them.
        gpus: GPUs to pretend.
        tps: tensor-parallel sizes; rank 0 of each is built.
        num_drafts: num_speculative_tokens.
        draft: folder or Hub id of a draft model with a checkpoint of its own.
        runtimes: the servers of the static check, whose rules are those of the newest version.
        progress: gets a line that says what is done now.

    Yields: what was found for each path, in order; a draft without its target has a refusal.

    Raises:
        VLLMError: vLLM's process cannot be started; of several versions, not one of them.
        CheckpointError: the separate draft cannot be read.
    """
    # The static check has the rules of one version, the newest that loads.
    rules = max([vllm.version for vllm in vllms], key=parsed)
    with ExitStack() as stack:
        # vLLM's processes import while the headers are read.
        needed = len(vllms) * len(gpus) * _PROCESS_BYTES
        loaders = dict[VLLM, list[DryLoader]]()
        if len(vllms) == 1 or needed < free_host_bytes():
            for vllm in vllms:
                loaders[vllm] = _started(stack, vllm, gpus)
        separate = None
        draft_folder = None
        runtime_of_draft = None
        if draft:
            separate = examine(draft, vllm=rules)
            if separate.refusal is not None:
                raise separate.refusal.at("--draft")
            draft_folder = stack.enter_context(headers_of(separate.readable()))
            runtime_of_draft = separate.runtime
        for path in paths:
            progress(f"{path}: static check")
            checked = examine(path, runtimes=runtimes, vllm=rules)
            source = checked.source
            if source is None:  # vLLM would fail on its files as well
                yield checked
                continue
            if not draft and has_dspark(source.config, source.entries):
                yield checked
                continue
            if checked.runtime is not None and not checked.runtime.view.family.num_layers_key:
                cure = f"Check the target: `keepmtp check TARGET --draft {shlex.quote(path)}`"
                rule = "a draft is loaded beside its target"
                yield checked._replace(refusal=RecipeError(path, rule, got="no target", cure=cure))
                continue
            with headers_of(source) as folder:
                job = Job(folder=folder, num_drafts=num_drafts, draft=draft_folder)
                # With method=mtp vLLM would refuse it, and nothing would be known of the target.
                if not draft and _never_had_a_block(checked):
                    job = replace(job, num_drafts=0)
                cases = list[Case]()
                for tp in tps:
                    cases.append((replace(job, tp=tp), checked, runtime_of_draft))
                accounts = list[LoadAccount]()
                refused = list[VLLMError]()
                unknown = list[VLLMError]()
                for vllm in vllms:
                    # Without room for all, a version ends before the next one starts.
                    with ExitStack() as brief:
                        try:
                            for loader in loaders.get(vllm) or _started(brief, vllm, gpus):
                                progress(f"{path}: dry load on {loader.gpu}, vLLM {vllm.version}")
                                loads = load_with_cures(loader, cases)
                                error = _over_others(vllm, checked, loads, runtime_of_draft)
                                if error is None:
                                    accounts += loads
                                else:
                                    unknown.append(error)
                        except VLLMError as error:
                            refused.append(error)
                if len(refused) == len(vllms):
                    raise refused[0]
            named = list[LoadAccount]()
            for account in accounts:
                # The folder that vLLM read may be one of headers alone.
                named.append(account.model_copy(update={"path": path}))
            checked = checked._replace(unjudged=(*refused, *unknown))
            if separate is not None:
                checked = _with_those_of_draft(checked, separate)
            yield with_loads(checked, named, draft=runtime_of_draft)


def _started(stack: ExitStack, vllm: VLLM, gpus: Sequence[GPU]) -> list[DryLoader]:
    return [stack.enter_context(DryLoader(vllm, gpu=gpu)) for gpu in gpus]


def _never_had_a_block(checked: Checked) -> bool:
    for finding in checked.data.findings:
        if finding.rule == "family" and finding.severity == "warning":
            return True
    return False


def _with_those_of_draft(checked: Checked, draft: Checked) -> Checked:
    """With the findings of a draft's own checkpoint: then the target needs no family's table."""
    findings = list[Finding]()
    for finding in checked.data.findings:
        if finding.rule != "family":
            findings.append(finding)
    return _with_findings(checked, (*findings, *draft.data.findings))


def _with_findings(checked: Checked, findings: Sequence[Finding], **also: object) -> Checked:
    update = {"findings": tuple(findings), **also}
    return checked._replace(data=checked.data.model_copy(update=update))


def load_with_cures(loader: DryLoader, cases: Sequence[Case]) -> list[LoadAccount]:
    """What this vLLM does as it is; where that ends in a defect of its own, it loads again with the
    cures of the family, and an account says so where they help.
    """
    accounts = loader.load_all([job for job, *_ in cases])
    again = dict[int, Job]()
    for number, (job, checked, draft) in enumerate(cases):
        runtime = draft or checked.runtime
        if runtime is None:
            continue
        family = runtime.view.family.model_type
        version = accounts[number].load.vllm
        cures = cures_in_vllm(family, runtime.draft_dialect.name, version)
        if not cures:  # findings of a large checkpoint take seconds; the caller makes them anyway
            continue
        loaded = with_loads(checked, [accounts[number]], draft=draft)
        for finding in errors_of(loaded.data.findings):
            if finding.rule == DEFECT:
                again[number] = replace(job, cures=",".join(cures))
    for number, account in zip(again, loader.load_all([*again.values()]), strict=True):
        _, checked, draft = cases[number]
        (judged,) = with_loads(checked, [account], draft=draft).accounts
        if judged.load.ok:
            accounts[number] = accounts[number].with_cures(account.load.cures)
    return accounts


def _over_others(
    vllm: VLLM, checked: Checked, loads: Sequence[LoadAccount], draft: RuntimeView | None
) -> VLLMError | None:
    """Why nobody knows what is wrong: this vLLM stops over packages that it is not made for, and
    neither the static check nor a known defect says why.
    """
    if not vllm.unmet or not checked.data.ok:
        return None
    # What stops there may be the fault of those packages as well as the checkpoint's.
    for finding in errors_of(with_loads(checked, loads, draft=draft).data.findings):
        if finding.rule not in (DEFECT, "family"):
            return VLLMError(
                f"vLLM {vllm.version}",
                f"requires {vllm.unmet}, to be judged",
                got=f"{finding.where}: {finding.says}",
                cure="Set VLLM_PYTHON to an environment made for it",
            )
    return None


def with_loads(
    checked: Checked,
    accounts: Sequence[LoadAccount],
    *,
    draft: RuntimeView | None = None,
) -> Checked:
    """A static check with dry loads; `draft` is the runtime of a draft's own checkpoint."""
    static = checked.data.findings
    family = dialect = ""
    if checked.runtime:
        family = checked.runtime.view.family.model_type
        dialect = checked.data.facts.dialect
    config: Raw = {}
    if draft:
        config = draft.source.config
    elif checked.source:
        config = checked.source.config
    judged = list[LoadAccount]()
    objected = list[tuple[DryLoad, list[Objection]]]()
    for account in accounts:
        version = account.load.vllm
        own = objections(
            account,
            checked.runtime,
            config=config,
            version=version,
            static=static,
            draft=draft,
        )
        errors = list[str]()
        for finding, *_ in own:
            if finding.severity == "error":
                errors.append(f"{finding.where}: {finding.says}")
        name_of_defect = ""
        failure = account.load.failure
        if failure is not None:
            defect = known_defect(failure, family=family, dialect=dialect, version=version)
            if defect is not None:
                name_of_defect = f"{defect.name}: {defect.sources}"
        judged.append(account.judged(errors, name_of_defect))
        objected.append((account.load, own))
    dry = tuple([account.load for account in judged])
    versions = {load.vllm for load in dry}
    findings = errors_first([*_bound(static, versions), *_once(objected)])
    facts = checked.data.facts
    for load in dry:
        if load.target.cls:  # vLLM has built the towers
            facts = facts.model_copy(update={"num_unjudged": 0})
    # Findings stay as they are: people search for vLLM's own words next to those of the rules.
    checked = _with_findings(checked, findings, dry=dry, facts=facts)
    return checked._replace(accounts=tuple(judged))


def _once(objected: Sequence[tuple[DryLoad, Sequence[Objection]]]) -> list[Finding]:
    """A finding for each cause, with every place that has it, and the largest count."""
    loads_of: dict[tuple[str, str, str], list[DryLoad]] = defaultdict(list)
    first = dict[tuple[str, str, str], Finding]()
    largest = dict[tuple[str, str, str], int]()
    versions = set[str]()
    for load, own in objected:
        versions.add(load.vllm)
        for cause, finding in by_cause(own).items():
            loads_of[cause].append(load)
            first.setdefault(cause, finding)
            largest[cause] = max(finding.count, largest.get(cause, 0))
    merged = list[Finding]()
    for cause, loads in loads_of.items():
        where = f"on {places(loads)}"
        if len(versions) > 1:
            where = by_whom(loads)
        finding = first[cause]
        update = {"says": f"{where}: {finding.says}", "count": largest[cause]}
        merged.append(finding.model_copy(update=update))
    return merged


def _bound(static: Iterable[Finding], versions: Collection[str]) -> list[Finding]:
    """Findings of the static check with the versions that they hold for, where another was
    tried.
    """
    others = [version for version in sorted(versions) if not is_known(version)]
    bound = list[Finding]()
    for finding in static:
        if others and finding.runtime == "vllm":
            says = (
                f"{finding.says} (a rule read from vLLM {KNOWN[0]} to {KNOWN[-1]}; of "
                f"{listed(others)} the dry load tells)"
            )
            finding = finding.model_copy(update={"says": says})
            # Rules that were read from none of the versions cannot fail a checkpoint: it was
            # loaded.
            if len(others) == len(versions):
                finding = finding.model_copy(update={"severity": "warning"})
        bound.append(finding)
    return bound
