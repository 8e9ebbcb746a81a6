"""What real vLLM servers did with a checkpoint and its source, with and without method=mtp.

In: outputs, vLLM's draft counters and times, which `validate/measure/serve_check.py` measures.
Out: a `ServeCheck`: every server of both checkpoints. serve.json and report.json hold it, field by
field.

Easy to get wrong: a fact judges nothing. `reasons` does, by the recipe's limits, and
`validate/report/gates.py` alone asks it.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from operator import not_
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import Field, computed_field

from ...checkpoints.fact import Count, Fact, NumDrafts
from ...recipes.errors import counted
from ...recipes.frozen import frozen
from ...recipes.protocol import Gates
from .numbers import figure
from .rows import CONFIDENCE, Arm, Row, detail, interval
from .settle import ReasonFact

T = TypeVar("T")
AsServed = Literal["native", "BF16 copy of the same weights"]

MENDED = "vLLM was mended by keepmtp's cures"
"""How the clause begins that names them."""

GAP_TOLERANCE = 0.25
"""Largest log-probability gap, in nats, at which two greedy runs may part without a fault.

BF16 logits near 16 are 0.0625 or 0.125 apart, and two of them decide; vLLM's CPU kernels were seen
to part at 0.156.
"""


class TargetFact(Fact):
    """The checkpoint that a draft of its own was judged and served with.

    Attributes:
        path: what the user named.
        revision: the Hub's commit, or local.
        sha256: of its `Identity`.
    """

    path: str
    revision: str
    sha256: str

    def __str__(self) -> str:
        return f"{self.path} ({self.sha256})"


def is_same(target: TargetFact | None, other: TargetFact | None) -> bool:
    """Whether both are the same bytes, or none."""
    return (target and target.sha256) == (other and other.sha256)


# No file of another checkpoint has the field.
OfDraft = Annotated[TargetFact | None, Field(exclude_if=not_)]


class Output(Fact):
    """What one server wrote after one prompt, greedily.

    Attributes:
        token_ids: the tokens, up to the end of text or the limit.
        text: the same as text.
        top_logprobs: for each token, log-probability by token id of the likeliest few; empty where
            nobody asked for them.
    """

    token_ids: tuple[int, ...]
    text: str
    top_logprobs: tuple[Mapping[int, float], ...] = ()


class Parting(Fact):
    """Where the output of one prompt parts from that of k=0.

    Attributes:
        prompt: number of the prompt, from 0.
        at: index of the first token that differs.
        plain_token: token id without drafting; None where that output had ended.
        token: token id with drafting; None where this output had ended.
        gap: log-probability without drafting of `plain_token` less that of `token`, in nats; None
            where it is unknown, because `token` was not among the likeliest few.
    """

    prompt: Count
    at: Count
    plain_token: int | None
    token: int | None
    gap: Annotated[float, Field(allow_inf_nan=False)] | None

    @computed_field
    @property
    def is_near_tie(self) -> bool:
        """The two tokens were so close that rounding may have chosen."""
        return self.gap is not None and self.gap <= GAP_TOLERANCE


class Drafts(Fact):
    """vLLM's draft counters over some prompts.

    Attributes:
        drafts: speculative steps (`vllm:spec_decode_num_drafts_total`).
        draft_tokens: tokens that were drafted.
        accepted_tokens: drafted tokens that the target kept.
        accepted_per_position: the same by position in the draft, k values.
    """

    drafts: Count = 0
    draft_tokens: Count = 0
    accepted_tokens: Count = 0
    accepted_per_position: Annotated[tuple[Count, ...], Field(max_length=1024)] = ()

    @computed_field
    @property
    def acceptance(self) -> float | None:
        """Share of drafted tokens that were kept; None where nothing was drafted."""
        if not self.draft_tokens:
            return None
        return self.accepted_tokens / self.draft_tokens

    @computed_field
    @property
    def acceptance_per_position(self) -> tuple[float, ...]:
        """Share of drafts whose token at each position was kept."""
        if not self.drafts:
            return ()
        return tuple([count / self.drafts for count in self.accepted_per_position])

    @computed_field
    @property
    def mean_accepted_length(self) -> float | None:
        """Tokens a step of the target: the accepted ones and the target's own; None where nothing
        was drafted.
        """
        if not self.drafts:
            return None
        return 1 + self.accepted_tokens / self.drafts

    def accepted(self, of: Arm, k: int, asked: str, *, is_detail: bool = False) -> Iterator[Row]:
        """The share of drafted tokens that were accepted, where any were drafted."""
        share = self.acceptance
        if share is None:
            return
        yield Row(
            metric="accepted",
            case=f"k={k}, {asked}",
            of=of,
            value=share,
            unit="%",
            around=interval(share, self.trials(k)),
            confidence=CONFIDENCE,
            n=self.draft_tokens,
            also=("", f", length {figure(self.mean_accepted_length)}"),
            is_detail=is_detail,
        )

    def trials(self, k: int) -> float:
        """Of acceptance: a later token is accepted only if all before it are, so the draft is the
        trial, not the token. One of which two of three are accepted is two thirds of a success.
        """
        return self.drafts or self.draft_tokens / k

    def since(self, earlier: "Drafts") -> "Drafts":
        """These counters less earlier ones of the same server."""
        return self._with(earlier, -1)

    def _with(self, other: "Drafts", sign: int) -> "Drafts":
        """Counter by counter; one that has no such position has accepted none there."""
        by_position = []
        positions = (self.accepted_per_position, other.accepted_per_position)
        for mine, theirs in zip_longest(*positions, fillvalue=0):
            by_position.append(mine + sign * theirs)
        return Drafts(
            drafts=self.drafts + sign * other.drafts,
            draft_tokens=self.draft_tokens + sign * other.draft_tokens,
            accepted_tokens=self.accepted_tokens + sign * other.accepted_tokens,
            accepted_per_position=tuple(by_position),
        )


class Run(Drafts):
    """One server, for one checkpoint with k speculative tokens (0: without method=mtp), and its
    counters.

    Attributes:
        loaded: the server came up and answered every prompt.
        partings: prompts whose output differs from that of k=0 of the same checkpoint; None where
            there is nothing to compare with (k=0 itself, or it did not load).
        error: vLLM's last error words; "" if loaded.
        log: path of the server's log.
    """

    k: NumDrafts
    loaded: bool
    partings: tuple[Parting, ...] | None = None
    error: str = ""
    log: str = ""


class ServedModel(Fact):
    """A checkpoint that was served.

    Attributes:
        role: the checkpoint that is judged, or the source that it is compared with.
        path: what the user named.
        as_served: the files themselves, or a BF16 copy of the same weights where this CPU has no
            kernel for them.
        reason: why a copy was served, and what that leaves unjudged; which cures vLLM has applied;
            "" for neither.
    """

    role: Arm
    path: str
    as_served: AsServed
    reason: str


class Served(ServedModel):
    """One checkpoint and every server that was started for it.

    Attributes:
        runs: by k, ascending.
    """

    runs: tuple[Run, ...]

    @property
    def drafting(self) -> tuple[Run, ...]:
        """The servers that came up with method=mtp, by k."""
        return tuple([run for run in self.runs if run.k and run.loaded])


@frozen
class Drafted:
    """Draft counters of a served checkpoint, and of its source over the same questions or prompts.

    Attributes:
        what: was asked, in words.
        unit: of what was asked, "questions" or "prompts".
        k: draft tokens a step.
        num_asked: questions or prompts.
        as_served: how the checkpoint was served, "native" for its own bytes.
        source: None where it was not asked, or drafted nothing.
    """

    what: str
    unit: str
    k: int
    num_asked: int
    as_served: str
    checkpoint: Drafts
    source: Drafts | None


class ResultFact(Fact):
    """What the file of a station holds.

    Attributes:
        station: whose file it is.
        part: of report.json that it is.
        command: that measures it, with the checkpoint's place left open.
        form: its version; another number is refused.
    """

    station: ClassVar[str]
    part: ClassVar[str]
    command: ClassVar[str]
    form: ClassVar[int]


@frozen
class Judging:
    """What the gates of every station are judged by.

    Attributes:
        gates: the recipe's limits.
        listed: its tasks.
        is_compared: outputs with and without drafting were compared.
    """

    gates: Gates
    listed: Collection[str]
    is_compared: bool


class StationFact(ResultFact):
    """What a station measured of a checkpoint, and of its source over the same. What is said here
    is of a station that has nothing to say of it.

    Attributes:
        source: what the checkpoint is compared with; None where the user had none.
        checkpoint: what is judged.
        environment: versions and device, words by name ("vllm": "0.32.0", "device": "CPU ...").
    """

    source: Any
    checkpoint: Any
    environment: Mapping[str, str]

    @property
    def models(self) -> tuple[Any, ...]:
        """Source first, then the checkpoint."""
        return those(self.source, self.checkpoint)

    @property
    def has_no_block(self) -> bool:
        """Whether a source was asked that cannot draft."""
        return False

    @property
    def is_compared(self) -> bool:
        """Whether the checkpoint's outputs with and without drafting were compared."""
        return False

    @property
    def native_or_copy(self) -> str:
        """How the checkpoint was served; "" where that says nothing of its loading."""
        return self.checkpoint.as_served

    @property
    def asked(self) -> tuple[str, ...]:
        """The gates that its command is to tell; findings, loads and lossless tell themselves."""
        return ()

    @classmethod
    def reasons(cls, fact: Any, judging: Judging) -> Iterator[ReasonFact]:
        """Of its gates, where the recipe has them; `fact` is what it measured, None where it did
        not.
        """
        return iter(())

    def rows(self, wanted: str) -> Iterator[Row]:
        """Its figures; `wanted` is the recipe's filter of answers."""
        return iter(())

    def notes(self) -> Iterator[str]:
        """What a reader of its rows should know."""
        return iter(())

    def drafted(self) -> Drafted | None:
        """Whose draft counters are judged."""
        return None

    def faults(self) -> Iterator[str]:
        """A sentence for each output that drafting changes, where rounding does not explain it."""
        return iter(())

    def failure(self) -> str:
        """Of a server of the checkpoint that did not come up, in a sentence."""
        return ""


def drafted(parts: Iterable[StationFact]) -> list[Drafted]:
    """What was measured of drafting, at most one of each station; the first is judged, and on top
    of the page: one that also asked the source.
    """
    found = [part.drafted() for part in parts]
    return sorted([one for one in found if one], key=lambda one: one.source is None)


def has_no_block(parts: Iterable[StationFact]) -> bool:
    """Whether the source was served with MTP off alone, as the first says that asked it."""
    for part in parts:
        if part.source is not None:
            return part.has_no_block
    return False


class ServeCheck(StationFact):
    """What `keepmtp eval` measured prompt by prompt.

    Attributes:
        source: what the checkpoint is compared with; None where the user had none.
        checkpoint: the checkpoint that is judged.
        num_prompts: that were asked.
    """

    station = "serve"
    part = "serve"
    command = "eval {}"
    form = 5

    source: Served | None
    checkpoint: Served
    num_prompts: Count

    def rows(self, wanted: str) -> Iterator[Row]:
        """By k what was accepted, and outputs that are those of k=0."""
        num = self.num_prompts
        asked = counted(num, "prompt")
        for model in self.models:
            for run in model.runs:
                yield from run.accepted(model.role, run.k, asked)
                case = f"k={run.k}, {asked}"
                if not run.loaded:
                    yield detail("server", case, model.role, None)
                if run.partings is not None:
                    same = num - len(run.partings)
                    yield detail("outputs as with k=0", case, model.role, same, n=num)

    @property
    def asked(self) -> tuple[str, ...]:
        """Without a source nothing is compared, by choice."""
        if self.source is None:
            return ()
        return ("acceptance",)

    @property
    def has_no_block(self) -> bool:
        """Its source was served with MTP off alone."""
        return bool(self.source) and all(run.loaded and not run.k for run in self.source.runs)

    def drafted(self) -> Drafted | None:
        """Of the largest k that both drafted with, else of the largest of all."""
        if not self.checkpoint.drafting:
            return None
        sources = {}
        if self.source:
            for run in self.source.drafting:
                if run.draft_tokens:
                    sources[run.k] = run
        run = max(self.checkpoint.drafting, key=lambda run: (run.k in sources, run.k))
        return Drafted(
            what=counted(self.num_prompts, "prompt"),
            unit="prompts",
            k=run.k,
            num_asked=self.num_prompts,
            as_served=self.checkpoint.as_served,
            checkpoint=run,
            source=sources.get(run.k),
        )

    def faults(self) -> Iterator[str]:
        """Partings that are no near-ties."""
        for served in self.models:
            for run in served.runs:
                for parting in run.partings or ():
                    if not parting.is_near_tie:
                        yield (
                            f"Drafting changes what is written: {served.role} with k={run.k} "
                            f"leaves the output without it in prompt {parting.prompt} at token "
                            f"{parting.at}, and no log-probability gap below {GAP_TOLERANCE:g} "
                            "explains it."
                        )

    def failure(self) -> str:
        """Of the first server that did not come up; a source's may fail without any fault here."""
        for run in self.checkpoint.runs:
            if not run.loaded:
                error = run.error.rstrip(".")
                return f"The server with k={run.k} did not come up: {error}."
        return ""

    @property
    def is_compared(self) -> bool:
        """Whether a server that drafts had one without to be compared with."""
        return any(run.partings is not None for run in self.checkpoint.runs)


def those(*models: T | None) -> tuple[T, ...]:
    """The models that were measured, in this order."""
    return tuple([model for model in models if model is not None])


def total(counted: Sequence[Drafts]) -> Drafts:
    """The counters of several servers together."""
    together = Drafts()
    for drafts in counted:
        together = together._with(drafts, 1)
    return together


def counters(counted: Drafts) -> dict[str, Any]:
    """The four counts alone, by name: fields of a fact that has them among others."""
    return counted.model_dump(include={*Drafts.model_fields})


def partings(plain: Sequence[Output], drafted: Sequence[Output]) -> tuple[Parting, ...]:
    """The prompts whose greedy output is not that of k=0, each at its first token that differs.

    Args:
        plain: outputs of k=0, with log-probabilities.
        drafted: outputs of k>0 for the same prompts.
    """
    found = []
    for prompt, (before, after) in enumerate(zip(plain, drafted, strict=True)):
        for at, (plain_token, token) in enumerate(zip_longest(before.token_ids, after.token_ids)):
            if plain_token == token:
                continue
            gap = None
            # Nobody asked for the likeliest tokens, or this output had ended.
            if at < len(before.top_logprobs):
                likeliest = before.top_logprobs[at]
                if plain_token in likeliest and token in likeliest:
                    gap = likeliest[plain_token] - likeliest[token]
            found.append(
                Parting(prompt=prompt, at=at, plain_token=plain_token, token=token, gap=gap)
            )
            break
    return tuple(found)
