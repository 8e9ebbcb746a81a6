"""report.json, version 3: everything that was found about one checkpoint.

In and out: the file itself. `report.py` fills it, `html.py` makes the page and `validate/publish/card.py` the model
card from it and from nothing else.

    schema, keepmtp, vllm, made_at      3, what wrote it, the vLLM that judged, when (UTC)
    path, verdict {ok, label, says}     the checkpoint, and the sentence on top of the page
    facts                               family, dialect, counts, bytes, forms of the MTP block
    findings [...]                      origin (static, dry), severity, where, says, cure, rule, count
    sizes [...]                         part, group, num_tensors, num_bytes, num_bytes_before
    dry [...]                           gpu, tp, k, ok, failure, target, draft, seconds, ...: a pretended GPU each
    calibration {...}                   what keepmtp.json says: data, coverage, acceptance by rows, candidates
    serve {...}                         what `ServeReport.as_dict` gives: gates, source, checkpoint, runs by k
    evaluation {...}                    GSM8K of source and checkpoint under one protocol, paired, with draft counters
    judgement {...}                     the recipe's gates: pass, regression or infeasible, with a reason each
    identity {...}                      the bytes that all of this was measured on, file by file
    results {file: sha256}              result files beside this one that hold the same numbers
    absent {part: sentence}             why sizes, dry, calibration, serve, evaluation or identity is empty

Easy to get wrong: a field that is added, renamed or read otherwise is a new version; unknown fields are refused, so
that a page never leaves out what it does not know.
"""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ...checkpoints.identity import Identity
from ...recipes.protocol import Evaluation, Gates
from ..check.findings import CheckpointFacts, Finding
from ..dryload.facts import DryLoad
from ..serving.acceptance import AsServed, Drafts, Role
from ..serving.acceptance import Verdict as GateVerdict

JudgementWord = Literal["pass", "regression", "infeasible"]
# keepmtp.json may be anybody's: numbers that could not have been measured are refused before they are drawn.
_Share = Annotated[float, Field(ge=0, le=1)]
_Figure = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=0, lt=2**63)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class GroupSize(_Part):
    """Bytes of one module group, scales included; `num_bytes_before` is the source's, None if none was given."""

    part: str
    group: str
    num_tensors: int
    num_bytes: int
    num_bytes_before: int | None = None


class DataFact(_Part):
    """The batches: where they are from, and sums that are equal exactly when they are."""

    dataset: str
    dataset_revision: str
    subset: str
    split: str
    column: str
    prompt_column: str = ""
    seed: _Count
    rows: _Count
    held_out_rows: _Count
    blank_rows: _Count
    tokens: _Count
    held_out_tokens: _Count
    held_out_written_tokens: _Count | None = None
    row_numbers_sha256: str
    ids_sha256: str
    held_out_ids_sha256: str


class FewestFact(_Part):
    """The module that the fewest tokens reached."""

    module: str
    tokens: _Count


class CoverageFact(_Part):
    """Modules that were calibrated; `never_routed` are experts that the router sent no token."""

    modules: _Count
    never_routed: tuple[str, ...]
    fewest_tokens: FewestFact | None


class AcceptanceFact(_Part):
    """Drafts that a server would accept, by the number of tokens it drafts a step ("1", "2", ...).

    Attributes:
        num_slots: slots of the text that count.
        by_position: share accepted at each position of the draft.
        mean_accepted_length: tokens a step of the target, its own included.
    """

    num_slots: _Count
    by_position: Annotated[Mapping[str, tuple[_Share, ...]], Field(min_length=1, max_length=16)]
    mean_accepted_length: Mapping[str, _Figure]

    @model_validator(mode="after")
    def _has_a_share_a_position(self) -> "AcceptanceFact":
        ks = [str(k) for k in range(1, len(self.by_position) + 1)]
        if sorted(self.by_position) != sorted(ks) or sorted(self.mean_accepted_length) != sorted(ks):
            raise ValueError("by_position and mean_accepted_length must be for 1 to k tokens a step")
        if any(len(shares) != int(k) for k, shares in self.by_position.items()):
            raise ValueError("by_position must have a share for each position")
        return self

    @property
    def k(self) -> int:
        """The most tokens a step that were tried."""
        return len(self.by_position)

    @property
    def shares(self) -> tuple[float, ...]:
        """By position, where the most are drafted."""
        return self.by_position[str(self.k)]

    @property
    def length(self) -> float:
        """Tokens a step of the target, where the most are drafted."""
        return self.mean_accepted_length[str(self.k)]


class MeasuredFact(_Part):
    """One backbone with one MTP block on held-out text; `perplexity` is the backbone's, per token."""

    backbone: Literal["source", "quantized"]
    mtp: Literal["source", "quantized"]
    perplexity: _Figure
    acceptance: AcceptanceFact | None

    @property
    def title(self) -> str:
        """For people."""
        if self.backbone == "source":
            return "released model"
        return f"quantized backbone, {'quantized MTP block' if self.mtp == 'quantized' else 'MTP block as released'}"


class CandidateFact(_Part):
    """A policy for the MTP block that `mtp: auto` tried; `kept` is its part of the released model's acceptance."""

    policy: str | Mapping[str, str]
    bytes: _Count
    kept: _Figure
    refused: str
    chosen: bool
    acceptance: AcceptanceFact | None

    @property
    def title(self) -> str:
        """For people."""
        if isinstance(self.policy, str):
            return self.policy
        return ", ".join(f"{group}: {word}" for group, word in self.policy.items())


class CalibrationFact(_Part):
    """What batches contributed to a checkpoint, and what they say of it without a server.

    Attributes:
        algorithm, sequence_length: the recipe's.
        data: the batches.
        processes: that shared them.
        coverage: of the backbone's modules.
        mtp: the policy for the MTP block, chosen where the recipe says auto.
        min_acceptance: what `mtp: auto` had to keep; None where the recipe does not say auto.
        rows: released model first.
        agreement: share of held-out slots where the quantized backbone chooses what the released one does.
        candidates: of `mtp: auto`, in the order tried.
        unmeasured: why there is no acceptance; "" if there is.
    """

    algorithm: str
    sequence_length: Annotated[int, Field(gt=0)]
    data: DataFact
    processes: _Count
    coverage: CoverageFact
    mtp: str | Mapping[str, str]
    min_acceptance: _Share | None
    rows: Annotated[tuple[MeasuredFact, ...], Field(max_length=3)]
    agreement: _Share
    candidates: Annotated[tuple[CandidateFact, ...], Field(max_length=100)]
    unmeasured: str

    @property
    def measured(self) -> tuple[tuple[MeasuredFact, AcceptanceFact], ...]:
        """The rows whose drafts were counted."""
        return tuple((row, row.acceptance) for row in self.rows if row.acceptance)

    @property
    def k(self) -> int:
        """The most tokens a step that were tried; 0 where none were."""
        return max((acceptance.k for _, acceptance in self.measured), default=0)


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


class ScoreFact(_Part):
    """Share of questions answered right, as one of lm-eval's filters reads the answers.

    Attributes:
        filter: strict-match wants "#### 12", flexible-extract takes the last number.
        value: from 0 to 1.
        stderr: of the mean over questions.
    """

    filter: str
    value: _Share
    stderr: _Figure


class PairedFact(_Part):
    """One filter's answers of source and checkpoint, question by question.

    Attributes:
        difference: checkpoint less source, as a share of all questions; negative is a loss.
        stderr: of `difference`, from the pairs.
        low, high: two-sided confidence interval of `difference` at `confidence`.
        both, only_source, only_checkpoint, neither: questions that they answer right.
    """

    filter: str
    difference: Annotated[float, Field(ge=-1, le=1)]
    stderr: _Figure
    low: Annotated[float, Field(ge=-1, le=1)]
    high: Annotated[float, Field(ge=-1, le=1)]
    confidence: _Share
    both: _Count
    only_source: _Count
    only_checkpoint: _Count
    neither: _Count


class EvaluatedFact(_Part):
    """One checkpoint's answers.

    Attributes:
        sha256: of the checkpoint's bytes, as `Identity.sha256`.
        num_questions: that were asked and answered.
        num_truncated: answers cut at max_tokens.
        num_tokens: generated.
        seconds: of asking, over all sittings if it was interrupted.
        drafts, draft_tokens, accepted_tokens, accepted_per_position: vLLM's counters over the same questions; all zero
            where k is 0. Steps in flight when a sitting was cut off are not in them.
        sittings: servers that were started; more than one where a run was resumed.
        samples: file with a line for each question, beside the report, and its SHA-256.
    """

    role: Role
    path: str
    sha256: str
    as_served: AsServed
    reason: str
    scores: Annotated[tuple[ScoreFact, ...], Field(min_length=1)]
    num_questions: Annotated[int, Field(gt=0)]
    num_truncated: _Count
    num_tokens: _Count
    seconds: _Figure
    drafts: _Count
    draft_tokens: _Count
    accepted_tokens: _Count
    accepted_per_position: tuple[_Count, ...]
    sittings: _Count
    samples: str
    samples_sha256: str

    @property
    def acceptance(self) -> float | None:
        """As `Drafts.acceptance`."""
        return self._counters.acceptance

    @property
    def acceptance_per_position(self) -> tuple[float, ...]:
        """As `Drafts.acceptance_per_position`."""
        return self._counters.acceptance_per_position

    @property
    def mean_accepted_length(self) -> float | None:
        """As `Drafts.mean_accepted_length`."""
        return self._counters.mean_accepted_length

    @property
    def _counters(self) -> Drafts:
        return Drafts(
            drafts=self.drafts,
            draft_tokens=self.draft_tokens,
            accepted_tokens=self.accepted_tokens,
            accepted_per_position=self.accepted_per_position,
        )

    def score(self, name: str) -> ScoreFact:
        """The score that one filter gives."""
        return next(score for score in self.scores if score.filter == name)


class EvaluationFact(_Part):
    """GSM8K through real servers with method=mtp.

    Attributes:
        protocol: the recipe's `evaluation` block, defaults filled in.
        dataset_sha256: of the questions and answers that were asked, in order.
        source: what the checkpoint was made from; None where it was not evaluated.
        paired: a row for each filter; empty without a source.
        environment: versions of lm-eval, vLLM, torch, transformers, and the device.
    """

    protocol: Evaluation
    dataset_sha256: str
    source: EvaluatedFact | None
    checkpoint: EvaluatedFact
    paired: tuple[PairedFact, ...]
    environment: Mapping[str, str]

    @property
    def evaluated(self) -> tuple[EvaluatedFact, ...]:
        """Source first, then the checkpoint."""
        return (self.checkpoint,) if self.source is None else (self.source, self.checkpoint)


class ReasonFact(_Part):
    """One gate's answer.

    Attributes:
        gate: findings, loads, acceptance or gsm8k.
        says: a sentence with the figures.
        needed: samples (questions or drafted tokens) with which it could be told; None where that is not the matter.
    """

    gate: str
    verdict: JudgementWord
    says: str
    needed: Annotated[int, Field(gt=0)] | None = None


class JudgementFact(_Part):
    """The recipe's gates together: the worst of the reasons, regression before infeasible before pass."""

    verdict: JudgementWord
    gates: Gates
    reasons: Annotated[tuple[ReasonFact, ...], Field(min_length=1)]


class VerdictFact(_Part):
    """The sentence on top, and how far the checkpoint came in a word or three."""

    ok: bool
    label: Literal["No fault found", "Loads", "Served", "Loads and drafts", "Not ready"]
    says: str


class FullReport(_Part):
    """The file; see the module's docstring."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_by_name=True, validate_by_alias=True)

    version: Literal[3] = Field(default=3, alias="schema")
    keepmtp: str
    vllm: str
    made_at: str
    path: str
    verdict: VerdictFact
    facts: CheckpointFacts
    findings: tuple[Finding, ...]
    sizes: tuple[GroupSize, ...] = ()
    dry: tuple[DryLoad, ...] = ()
    calibration: CalibrationFact | None = None
    serve: Serve | None = None
    evaluation: EvaluationFact | None = None
    judgement: JudgementFact | None = None
    identity: Identity | None = None
    results: Mapping[str, str] = Field(default_factory=dict)
    absent: Mapping[str, str] = Field(default_factory=dict)
