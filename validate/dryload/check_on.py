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

from ...quantize.needs.memory import free_host_bytes
from ...recipes.errors import RecipeError, VLLMError
from ...recipes.families import has_dspark
from ...recipes.frozen import Json, Raw, Say
from ...recipes.runtimes import Runtime
from ...recipes.runtimes.vllm import KNOWN, is_known, parsed
from ..check.check import VLLM_ALONE, Checked, examine
from ..check.runtime_view import RuntimeView
from ..facts.dry_load import (
    GPU,
    DryLoad,
    LoadAccount,
    by_version,
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
    progress: Say = lambda doing: None,
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
    rules = max((vllm.version for vllm in vllms), key=parsed)
    with ExitStack() as stack:
        needed = len(vllms) * len(gpus) * _PROCESS_BYTES
        fits = len(vllms) == 1 or needed < free_host_bytes()
        loaders = {vllm: _started(stack, vllm, gpus) for vllm in vllms if fits}
        separate = own = runtime_of_draft = None
        if draft:
            separate = examine(draft, vllm=rules)
            if separate.refusal is not None:
                raise separate.refusal.at("--draft")
            own = stack.enter_context(headers_of(separate.readable()))
            runtime_of_draft = separate.runtime
        for path in paths:
            progress(f"{path}: static check")
            checked = examine(path, runtimes=runtimes, vllm=rules)
            source, runtime = checked.source, checked.runtime
            if source is None or (own is None and has_dspark(source.config, source.entries)):
                yield checked
                continue
            if runtime is not None and not runtime.view.family.num_layers_key:
                cure = f"Check the target: `keepmtp check TARGET --draft {shlex.quote(path)}`"
                rule = "a draft is loaded beside its target"
                yield checked._replace(refusal=RecipeError(path, rule, got="no target", cure=cure))
                continue
            # A model that never had an MTP block is loaded without a draft.
            k, accounts = num_drafts, list[LoadAccount]()
            for each in checked.data.findings:
                if own is None and (each.rule, each.severity) == ("family", "warning"):
                    k = 0
            with headers_of(source) as folder:
                cases = list[Case]()
                for tp in tps:
                    job = Job(folder=folder, tp=tp, num_drafts=k, draft=own)
                    cases.append((job, checked, runtime_of_draft))
                refused, unknown = list[VLLMError](), list[VLLMError]()
                for vllm in vllms:
                    # Without room for all, a version ends before the next one starts.
                    with ExitStack() as brief:
                        try:
                            for loader in loaders.get(vllm) or _started(brief, vllm, gpus):
                                progress(f"{path}: dry load on {loader.gpu}, vLLM {vllm.version}")
                                loads = load_with_cures(loader, cases)
                                if error := _over_others(vllm, checked, loads, runtime_of_draft):
                                    unknown.append(error)
                                else:
                                    accounts += loads
                        except VLLMError as error:
                            refused.append(error)
                if len(refused) == len(vllms):
                    raise refused[0]
            accounts = [account.model_copy(update={"path": path}) for account in accounts]
            checked = checked._replace(unjudged=(*refused, *unknown))
            if separate is not None:  # then the target needs no family's table
                kept = [each for each in checked.data.findings if each.rule != "family"]
                update = {"findings": (*kept, *separate.data.findings)}
                checked = checked._replace(data=checked.data.model_copy(update=update))
            yield with_loads(checked, accounts, draft=runtime_of_draft)


def _started(stack: ExitStack, vllm: VLLM, gpus: Sequence[GPU]) -> list[DryLoader]:
    return [stack.enter_context(DryLoader(vllm, gpu=gpu)) for gpu in gpus]


def load_with_cures(loader: DryLoader, cases: Sequence[Case]) -> list[LoadAccount]:
    """What this vLLM does as it is; where that ends in a defect of its own, it loads again with the
    cures of the family, and an account says so where they help.
    """
    accounts, again = loader.load_all([job for job, *_ in cases]), dict[int, Job]()
    for number, (job, checked, draft) in enumerate(cases):
        runtime, account = draft or checked.runtime, accounts[number]
        if runtime is None:
            continue
        family, dialect = runtime.view.family.model_type, runtime.draft_dialect.name
        cures = cures_in_vllm(family, dialect, account.load.vllm)
        if not cures:  # findings of a large checkpoint take seconds; the caller makes them anyway
            continue
        found = errors_of(with_loads(checked, [account], draft=draft).data.findings)
        if DEFECT in {each.rule for each in found}:
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
    if not (vllm.unmet and checked.data.ok):
        return None
    found = with_loads(checked, loads, draft=draft).data.findings
    errors = [each for each in errors_of(found) if each.rule not in (DEFECT, "family")]
    if not errors:
        return None
    rule, got = f"requires {vllm.unmet}, to be judged", f"{errors[0].where}: {errors[0].says}"
    cure = "Set VLLM_PYTHON to an environment made for it"
    return VLLMError(f"vLLM {vllm.version}", rule, got=got, cure=cure)


def with_loads(
    checked: Checked,
    accounts: Sequence[LoadAccount],
    *,
    draft: RuntimeView | None = None,
) -> Checked:
    """A static check with dry loads; `draft` is the runtime of a draft's own checkpoint."""
    static, judged = checked.data.findings, list[LoadAccount]()
    found = list[tuple[DryLoad, list[Objection]]]()
    family = dialect = ""
    if checked.runtime:
        family = checked.runtime.view.family.model_type
        dialect = checked.data.facts.dialect
    source = checked.source
    config: Raw = {}
    if draft:
        source = draft.source
    if source:
        config = source.config
    for account in accounts:
        version, failure, defect = account.load.vllm, account.load.failure, None
        own = objections(
            account,
            checked.runtime,
            config=config,
            version=version,
            static=static,
            draft=draft,
        )
        errors = []
        for finding, *_ in own:
            if finding.severity == "error":
                errors.append(f"{finding.where}: {finding.says}")
        if failure is not None:
            known = {"family": family, "dialect": dialect, "version": version}
            defect = known_defect(failure, **known)
        judged.append(account.judged(errors, f"{defect.name}: {defect.sources}" if defect else ""))
        found.append((account.load, own))
    dry = tuple(account.load for account in judged)
    merged = [*_bound(static, {load.vllm for load in dry}), *_once(found)]
    update: Json = {"findings": errors_first(merged), "dry": dry}
    if any(load.target.cls for load in dry):  # vLLM has built the towers
        update["facts"] = checked.data.facts.model_copy(update={"num_unjudged": 0})
    return checked._replace(data=checked.data.model_copy(update=update), accounts=tuple(judged))


def _once(found: Sequence[tuple[DryLoad, Sequence[Objection]]]) -> list[Finding]:
    """A finding for each cause, with every place that has it, and the largest count."""
    seen: dict[tuple[str, str, str], list[tuple[DryLoad, Finding]]] = defaultdict(list)
    for load, own in found:
        for cause, finding in by_cause(own).items():
            seen[cause].append((load, finding))
    merged, are_several = [], len(by_version(load for load, _ in found)) > 1
    for each in seen.values():
        loads, findings = zip(*each, strict=True)
        count = max(finding.count for finding in findings)
        where = by_whom(loads) if are_several else f"on {places(loads)}"
        says = f"{where}: {findings[0].says}"
        merged.append(findings[0].model_copy(update={"says": says, "count": count}))
    return merged


def _bound(static: Iterable[Finding], versions: Collection[str]) -> list[Finding]:
    """Findings of the static check with the versions that they hold for, where another was tried.

    Rules that were read from none of the versions cannot fail a checkpoint: it was loaded.
    """
    others = sorted(version for version in versions if not is_known(version))
    bound = list[Finding]()
    for finding in static:
        if others and finding.runtime == "vllm":
            says = f"{finding.says} (a rule read from vLLM {KNOWN[0]} to {KNOWN[-1]}; of "
            says += f"{listed(others)} the dry load tells)"
            finding = finding.model_copy(update={"says": says})
            if len(others) == len(versions):
                finding = finding.model_copy(update={"severity": "warning"})
        bound.append(finding)
    return bound
