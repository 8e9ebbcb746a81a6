"""`keepmtp check --gpu`: the static check, then vLLM's own classes and loaders on a GPU that is not
there.

In: checkpoints, pretended GPUs, TP sizes, a number of drafts. Out: a `Checked` for each checkpoint,
with what both found. vLLM's processes start first: they import while the headers are read.

Easy to get wrong: a checkpoint with findings is loaded all the same, because people search for
vLLM's own words. Only a checkpoint whose files cannot be read is not loaded. A model that never had
an MTP block is loaded without a draft.
"""

import shlex
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from ...recipes.errors import RecipeError
from ...recipes.families import has_dspark
from ..check.check import VLLM_ALONE, Checked, examine
from ..check.runtime_view import RuntimeView
from ..facts.dry_load import GPU, DryLoad, LoadAccount, places
from ..facts.findings import Finding, Objection, Runtime, by_cause, errors_first
from ..facts.vllm_env import VLLM
from .hollow import headers_of
from .loader import DryLoader, Job
from .verdict_findings import objections


def check_on(
    paths: Sequence[str],
    *,
    vllm: VLLM,
    gpus: Sequence[GPU],
    tps: Sequence[int] = (1,),
    num_drafts: int = 1,
    draft: str = "",
    runtimes: Sequence[Runtime] = VLLM_ALONE,
    progress: Callable[[str], None] = lambda doing: None,
) -> Iterator[Checked]:
    """Check and load checkpoints, one after the other, on every GPU at every TP size.

    Args:
        paths: folders or Hub ids.
        vllm: the environment that loads them.
        gpus: GPUs to pretend.
        tps: tensor-parallel sizes; rank 0 of each is built.
        num_drafts: num_speculative_tokens.
        draft: folder or Hub id of a draft model with a checkpoint of its own.
        runtimes: the servers of the static check.
        progress: gets a line that says what is done now.

    Yields: what was found for each path, in order; a draft without its target has a refusal.

    Raises:
        VLLMError: vLLM's process cannot be started.
        CheckpointError: the separate draft cannot be read.
    """
    with ExitStack() as stack:
        loaders = [stack.enter_context(DryLoader(vllm, gpu=gpu)) for gpu in gpus]
        separate = _Draft.read(draft, stack) if draft else None
        for path in paths:
            progress(f"{path}: static check")
            checked = examine(path, runtimes=runtimes)
            source = checked.source
            if source is None or (separate is None and has_dspark(source.config, source.entries)):
                yield checked
                continue
            if checked.runtime is not None and not checked.runtime.view.family.num_layers_key:
                yield checked._replace(refusal=_no_target(path))
                continue
            with headers_of(source) as folder:
                own = separate.folder if separate else None
                drafts = (
                    0 if separate is None and _has_nothing_to_draft_with(checked) else num_drafts
                )
                jobs = [Job(folder=folder, tp=tp, num_drafts=drafts, draft=own) for tp in tps]
                accounts: list[LoadAccount] = []
                for loader in loaders:
                    progress(f"{path}: dry load on {loader.gpu}")
                    accounts += loader.load_all(jobs)
            accounts = [account.model_copy(update={"path": path}) for account in accounts]
            yield with_loads(
                separate.joined(checked) if separate else checked,
                accounts,
                vllm.version,
                draft=separate.checked.runtime if separate else None,
            )


def with_loads(
    checked: Checked,
    accounts: Sequence[LoadAccount],
    version: str,
    *,
    draft: RuntimeView | None = None,
) -> Checked:
    """A static check with dry loads; `draft` is the runtime of a draft's own checkpoint."""
    counted: list[LoadAccount] = []
    found: list[tuple[DryLoad, list[Objection]]] = []
    for account in accounts:
        own = objections(
            account, checked.runtime, version=version, static=checked.data.findings, draft=draft
        )
        counted.append(account.counted(sum(each.finding.severity == "error" for each in own)))
        found.append((account.load, own))
    update = {
        "findings": errors_first([*checked.data.findings, *_once(found)]),
        "dry": tuple(account.load for account in counted),
    }
    return checked._replace(data=checked.data.model_copy(update=update), accounts=tuple(counted))


def _once(found: Sequence[tuple[DryLoad, list[Objection]]]) -> list[Finding]:
    """A finding for each cause, with every GPU and TP size that has it; of their counts, the
    largest.
    """
    seen: dict[tuple[str, str, str], list[tuple[DryLoad, Finding]]] = defaultdict(list)
    for load, objected in found:
        for cause, finding in by_cause(objected).items():
            seen[cause].append((load, finding))
    merged = []
    for each in seen.values():
        loads, findings = zip(*each, strict=True)
        most = max(findings, key=lambda finding: finding.count).count
        says = f"on {places(loads)}: {findings[0].says}"
        merged.append(findings[0].model_copy(update={"says": says, "count": most}))
    return merged


def _has_nothing_to_draft_with(checked: Checked) -> bool:
    """Whether it is a model without an MTP block, which is loaded without a draft."""
    return any(
        (each.rule, each.severity) == ("family", "warning") for each in checked.data.findings
    )


def _no_target(path: str) -> RecipeError:
    cure = f"Check the target: `keepmtp check TARGET --draft {shlex.quote(path)}`"
    return RecipeError(path, "a draft is loaded beside its target", got="no target", cure=cure)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Draft:
    """A draft with a checkpoint of its own."""

    folder: Path
    checked: Checked

    @classmethod
    def read(cls, where: str, stack: ExitStack) -> "_Draft":
        checked = examine(where)
        if checked.source is None:
            assert checked.refusal is not None
            raise checked.refusal.at("--draft")
        return cls(folder=stack.enter_context(headers_of(checked.source)), checked=checked)

    def joined(self, target: Checked) -> Checked:
        """The target with the static findings of both; a target with a separate draft needs no
        family's table.
        """
        kept = [finding for finding in target.data.findings if finding.rule != "family"]
        findings = (*kept, *self.checked.data.findings)
        return target._replace(data=target.data.model_copy(update={"findings": findings}))
