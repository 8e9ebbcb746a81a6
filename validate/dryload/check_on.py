"""`keepmtp check --gpu`: the static check, then vLLM's own classes and loaders on a GPU that is not there.

In: checkpoints, pretended GPUs, TP sizes, a number of drafts. Out: one `Report` a checkpoint, with what both found.
vLLM's processes are started first: they import while the headers are read.

Easy to get wrong: a checkpoint with findings is loaded all the same, since vLLM's own words are what people search for;
only one whose files cannot be read is not.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from ...checkpoints.source import Source
from ...recipes.errors import CheckpointError, RecipeError
from ..check.check import examine
from ..check.findings import Report, grouped
from ..check.runtime_view import Evidence
from ..serving.vllm_env import VLLM
from .loader import GPU, DryLoader, Job, Verdict, headers_of
from .verdict_findings import findings


class Checked(NamedTuple):
    """A report and what it was made from: headers (None if unreadable), evidence (None without a family's table)."""

    report: Report
    source: Source | None
    evidence: Evidence | None


def check_on(
    paths: Sequence[str],
    *,
    vllm: VLLM,
    gpus: Sequence[GPU],
    tps: Sequence[int] = (1,),
    num_drafts: int = 1,
    draft: str = "",
    watch: Callable[[str], None] = lambda doing: None,
) -> Iterator[Checked]:
    """Judge checkpoints, one after the other, on every GPU at every TP size.

    Args:
        paths: folders or Hub ids.
        vllm: the environment that judges.
        gpus: GPUs to pretend.
        tps: tensor-parallel sizes; rank 0 of each is built.
        num_drafts: num_speculative_tokens.
        draft: folder or Hub id of a draft model with a checkpoint of its own.
        watch: told what is being done, for a progress line.

    Yields: what was found for each path, in order.

    Raises:
        VLLMError: vLLM's process cannot be started.
        CheckpointError: the separate draft cannot be read.
        RecipeError: a path is a draft, which cannot be loaded without its target.
    """
    with ExitStack() as stack:
        loaders = [stack.enter_context(DryLoader(vllm, gpu=gpu)) for gpu in gpus]
        beside = _Draft.read(draft, stack) if draft else None
        for path in paths:
            watch(f"{path}: static check")
            report, source, evidence = examine(path)
            if source is None:
                yield Checked(report, None, None)
                continue
            if evidence is not None and not evidence.view.family.num_layers_key:
                raise RecipeError(
                    path,
                    "a draft is loaded beside its target",
                    got="no target",
                    cure=f"Check the target: keepmtp check TARGET --draft {path}",
                )
            with headers_of(source) as folder:
                own = beside.folder if beside else None
                jobs = [Job(folder=folder, tp=tp, num_drafts=num_drafts, draft=own) for tp in tps]
                verdicts: list[Verdict] = []
                for loader in loaders:
                    watch(f"{path}: dry load on {loader.gpu}")
                    verdicts += loader.judge_all(jobs)
            told = [replace(verdict, path=path) for verdict in verdicts]
            if beside is not None:
                report = beside.joined(report)
            judged = with_verdicts(report, evidence, told, vllm.version, draft=beside.evidence if beside else None)
            yield Checked(judged, source, evidence)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Draft:
    """A draft with a checkpoint of its own."""

    folder: Path
    report: Report
    evidence: Evidence | None

    @classmethod
    def read(cls, where: str, stack: ExitStack) -> "_Draft":
        report, source, evidence = examine(where)
        if source is None:
            raise CheckpointError(
                where, "the draft must be readable", got=report.findings[0].says, cure="Check --draft"
            )
        return cls(folder=stack.enter_context(headers_of(source)), report=report, evidence=evidence)

    def joined(self, target: Report) -> Report:
        """The target's static findings and the draft's; a target needs no family's table to have a draft beside it."""
        kept = [finding for finding in target.findings if finding.rule != "family"]
        return replace(target, findings=(*kept, *self.report.findings))


def with_verdicts(
    report: Report,
    evidence: Evidence | None,
    verdicts: Sequence[Verdict],
    version: str,
    *,
    draft: Evidence | None = None,
) -> Report:
    """A static check's report with what dry loads found; `draft` is the evidence of a draft's own checkpoint."""
    found = [
        finding
        for verdict in verdicts
        for finding in findings(verdict, evidence, version=version, static=report.findings, draft=draft)
    ]
    return replace(report, findings=grouped([*report.findings, *found]), dry=tuple(verdicts))
