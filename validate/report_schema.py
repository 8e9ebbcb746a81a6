"""report.json, version 1: everything that was found about one checkpoint.

In and out: the file itself. `report.py` fills it, `report_html.py` makes the page from it and from nothing else.

    schema, keepmtp, vllm, made_at      1, what wrote it, the vLLM that judged, when (UTC)
    path, verdict {ok, label, says}     the checkpoint, and the sentence on top of the page
    facts                               family, dialect, counts, bytes, forms of the MTP block
    findings [...]                      origin (static, dry), severity, where, says, cure, rule, count
    sizes [...]                         part, group, num_tensors, num_bytes, num_bytes_before
    dry [...]                           gpu, tp, k, ok, failure, target, draft, seconds, ...: a pretended GPU each
    serve {...}                         what `ServeReport.as_dict` gives: gates, source, checkpoint, runs by k
    absent {part: sentence}             why sizes, dry or serve is empty

Easy to get wrong: a field that is added, renamed or read otherwise is a new version; unknown fields are refused, so
that a page never leaves out what it does not know.
"""

from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from .acceptance import AsServed, Role
from .acceptance import Verdict as GateVerdict
from .findings import Severity

Origin = Literal["static", "dry"]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class FindingFact(_Part):
    """A `Finding` and the station that made it."""

    origin: Origin
    severity: Severity
    where: str
    says: str
    cure: str
    rule: str
    count: int = 1


class CheckpointFacts(_Part):
    """What the checkpoint is, as in `Facts`."""

    family: str = ""
    dialect: str = ""
    num_tensors: int = 0
    num_bytes: int = 0
    num_mtp_tensors: int = 0
    num_mtp_layers: int = 0
    mtp_forms: tuple[str, ...] = ()


class GroupSize(_Part):
    """Bytes of one module group, scales included; `num_bytes_before` is the source's, None if none was given."""

    part: str
    group: str
    num_tensors: int
    num_bytes: int
    num_bytes_before: int | None = None


class KernelUse(_Part):
    """`count` layers of one kind, and what vLLM would run them with; `where` is the prefix of the first.

    `outcome` is "ok", "refused: ...", or "not judged: ..." where values or compiled operators decide.
    """

    layer: str
    method: str
    kernel: str
    count: int
    where: str
    outcome: str


class LoadedModel(_Part):
    """A target or draft after loading: parameters that the loader filled, of how many; `shared` are the target's."""

    cls: str
    num_params: int
    num_written: int
    shared: tuple[str, ...] = ()
    kernels: tuple[KernelUse, ...] = ()


class LoadFailure(_Part):
    """vLLM's exception, in its own words; `tensor` is what the loader had in hand."""

    stage: str
    role: str
    type: str
    words: str
    at: str = ""
    tensor: str = ""


class DryLoad(_Part):
    """One dry load. `k`: draft tokens a step; `ok`: it gave rise to no error, neither vLLM's nor our account's."""

    gpu: str
    tp: int
    k: int
    ok: bool
    num_errors: int = 0
    failure: LoadFailure | None = None
    target: LoadedModel
    draft: LoadedModel
    runner: str = ""
    seconds: float = 0.0
    peak_mib: int = 0


class PartingFact(_Part):
    """Where the output of one prompt leaves that of k=0; `gap` in nats, None where unknown."""

    prompt: int
    at: int
    plain_token: int | None
    token: int | None
    gap: float | None
    is_near_tie: bool


class OutputFact(_Part):
    """What a server wrote after one prompt."""

    token_ids: tuple[int, ...]
    text: str


class RunFact(_Part):
    """One server, with k draft tokens a step (0: without method=mtp); see `acceptance.Run`."""

    k: int
    loaded: bool
    seconds_to_health: float | None
    tokens_per_second: float | None
    speed_up: float | None
    drafts: int
    draft_tokens: int
    accepted_tokens: int
    accepted_per_position: tuple[int, ...]
    acceptance: float | None
    acceptance_per_position: tuple[float, ...]
    mean_accepted_length: float | None
    outputs: tuple[OutputFact, ...]
    partings: tuple[PartingFact, ...] | None
    is_repeatable: bool
    unwritten: tuple[str, ...]
    notes: tuple[str, ...]
    error: str
    log: str


class ServedFact(_Part):
    """One checkpoint and its servers; `as_served` and `reason` say whether its own bytes ran."""

    role: Role
    path: str
    as_served: AsServed
    reason: str
    dtype: str
    num_bytes: int
    runs: tuple[RunFact, ...]

    def run(self, k: int) -> RunFact | None:
        """The server with k draft tokens, if one came up."""
        return next((run for run in self.runs if run.k == k and run.loaded), None)

    @property
    def drafting(self) -> tuple[RunFact, ...]:
        """The servers that came up with method=mtp, by k."""
        return tuple(run for run in self.runs if run.k and run.loaded)


class GateFact(_Part):
    """One question to the servers and its answer."""

    name: str
    verdict: GateVerdict
    says: str


class Serve(_Part):
    """A real server's answers; `floor` is the least acceptance as a share of the source's."""

    ok: bool
    gates: tuple[GateFact, ...]
    floor: float
    source: ServedFact | None
    checkpoint: ServedFact
    prompts: tuple[str, ...]
    max_tokens: int
    environment: Mapping[str, str]
    seconds: float

    @property
    def served(self) -> tuple[ServedFact, ...]:
        """Source first, then the checkpoint."""
        return (self.checkpoint,) if self.source is None else (self.source, self.checkpoint)


class VerdictFact(_Part):
    """The sentence on top, and how far the checkpoint came in a word or three."""

    ok: bool
    label: Literal["No fault found", "Loads", "Served", "Loads and drafts", "Not ready"]
    says: str


class FullReport(_Part):
    """The file; see the module's docstring."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_by_name=True, validate_by_alias=True)

    version: Literal[1] = Field(default=1, alias="schema")
    keepmtp: str
    vllm: str
    made_at: str
    path: str
    verdict: VerdictFact
    facts: CheckpointFacts
    findings: tuple[FindingFact, ...]
    sizes: tuple[GroupSize, ...] = ()
    dry: tuple[DryLoad, ...] = ()
    serve: Serve | None = None
    absent: Mapping[str, str] = Field(default_factory=dict)
