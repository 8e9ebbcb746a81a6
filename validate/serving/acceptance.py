"""What a real vLLM server did with a checkpoint and its source, with and without method=mtp, and whether that is good.

In: for every server that was started, its outputs and vLLM's own draft counters (`validate/serving/serve_check.py`
collects them).
Out: a `ServeReport`: numbers by checkpoint and by k (speculative tokens a step), and three gates.

Easy to get wrong: equal outputs say nothing about a draft. The target verifies every token, so a dead draft only costs
speed; acceptance, measured against the unquantized source in the same run, decides. The other way round, kernels
for other batch shapes may part at a near-tie without any fault, so a parting is judged by its gap.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Role = Literal["source", "checkpoint"]
AsServed = Literal["native", "BF16 copy of the same weights"]
Verdict = Literal["passed", "failed", "not judged"]

FLOOR = 0.97
"""Least acceptance of a checkpoint, as a share of its source's."""

GAP_TOLERANCE = 0.25
"""Largest log-probability gap, in nats, at which two greedy runs may part without a fault.

BF16 logits near 16 are 0.0625 or 0.125 apart, and two of them decide; vLLM's CPU kernels were seen to part at 0.156.
"""

FEW_DRAFTS = 200
"""Below so many drafted tokens, one more or less accepted moves acceptance by half a point: said in the report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What one server wrote after one prompt, greedily.

    Attributes:
        token_ids: the tokens, up to the end of text or the limit.
        text: the same as text.
        top_logprobs: for each token, log-probability by token id of the likeliest few; empty where not asked for.
    """

    token_ids: tuple[int, ...]
    text: str
    top_logprobs: tuple[dict[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Parting:
    """Where the output of one prompt leaves that of k=0.

    Attributes:
        prompt: number of the prompt, from 0.
        at: index of the first differing token.
        plain_token: token id without drafting; None where that output had ended.
        token: token id with drafting; None where this output had ended.
        gap: log-probability without drafting of `plain_token` less that of `token`, in nats; None where unknown,
            because `token` was not among the likeliest few.
    """

    prompt: int
    at: int
    plain_token: int | None
    token: int | None
    gap: float | None

    @property
    def is_near_tie(self) -> bool:
        """The two tokens were so close that rounding may have chosen."""
        return self.gap is not None and self.gap <= GAP_TOLERANCE


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafts:
    """vLLM's counters over the prompts of one server.

    Attributes:
        drafts: speculative steps (`vllm:spec_decode_num_drafts_total`).
        draft_tokens: tokens drafted.
        accepted_tokens: drafted tokens that the target kept.
        accepted_per_position: the same by position in the draft, k values.
    """

    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_position: tuple[int, ...] = ()

    def since(self, earlier: "Drafts") -> "Drafts":
        """These counters less earlier ones of the same server."""
        zeros = (0,) * (len(self.accepted_per_position) - len(earlier.accepted_per_position))
        pairs = zip(self.accepted_per_position, (*earlier.accepted_per_position, *zeros), strict=True)
        return Drafts(
            drafts=self.drafts - earlier.drafts,
            draft_tokens=self.draft_tokens - earlier.draft_tokens,
            accepted_tokens=self.accepted_tokens - earlier.accepted_tokens,
            accepted_per_position=tuple(now - before for now, before in pairs),
        )

    @property
    def acceptance(self) -> float | None:
        """Share of drafted tokens that were kept; None where nothing was drafted."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else None

    @property
    def acceptance_per_position(self) -> tuple[float, ...]:
        """Share of drafts whose token at each position was kept."""
        return tuple(count / self.drafts for count in self.accepted_per_position) if self.drafts else ()

    @property
    def mean_accepted_length(self) -> float | None:
        """Tokens a step of the target: the accepted ones and the target's own; None where nothing was drafted."""
        return 1 + self.accepted_tokens / self.drafts if self.drafts else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One server: one checkpoint served with k speculative tokens (0: without method=mtp).

    Attributes:
        loaded: the server came up and answered every prompt.
        seconds_to_health: process start to a healthy server; None if it never was.
        tokens_per_second: generated tokens over wall time, one request at a time, prompts and log-probabilities
            included; None if not loaded.
        drafts: vLLM's counters, all zero for k=0.
        outputs: one for each prompt; empty if not loaded.
        partings: prompts whose output differs from that of k=0 of the same checkpoint; None where there is nothing to
            compare with (k=0 itself, or it did not load).
        speed_up: tokens a second over those of k=0 of the same checkpoint; None likewise.
        is_repeatable: the first prompt, which is asked twice, got the same tokens both times.
        unwritten: runtime parameters that vLLM's weight tracking found without a tensor in the checkpoint and that
            no rule explains; the run was then repeated without tracking.
        notes: what a reader should know, a sentence each.
        error: vLLM's last error words; "" if loaded.
        log: path of the server's log.
    """

    k: int
    loaded: bool
    seconds_to_health: float | None = None
    tokens_per_second: float | None = None
    drafts: Drafts = Drafts()
    outputs: tuple[Output, ...] = ()
    partings: tuple[Parting, ...] | None = None
    speed_up: float | None = None
    is_repeatable: bool = True
    unwritten: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    error: str = ""
    log: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For report.json: outputs as token ids and text, without log-probabilities."""
        return {
            "k": self.k,
            "loaded": self.loaded,
            "seconds_to_health": self.seconds_to_health,
            "tokens_per_second": self.tokens_per_second,
            "speed_up": self.speed_up,
            "drafts": self.drafts.drafts,
            "draft_tokens": self.drafts.draft_tokens,
            "accepted_tokens": self.drafts.accepted_tokens,
            "accepted_per_position": list(self.drafts.accepted_per_position),
            "acceptance": self.drafts.acceptance,
            "acceptance_per_position": list(self.drafts.acceptance_per_position),
            "mean_accepted_length": self.drafts.mean_accepted_length,
            "outputs": [{"token_ids": list(output.token_ids), "text": output.text} for output in self.outputs],
            "partings": None
            if self.partings is None
            else [
                {
                    "prompt": p.prompt,
                    "at": p.at,
                    "plain_token": p.plain_token,
                    "token": p.token,
                    "gap": p.gap,
                    "is_near_tie": p.is_near_tie,
                }
                for p in self.partings
            ],
            "is_repeatable": self.is_repeatable,
            "unwritten": list(self.unwritten),
            "notes": list(self.notes),
            "error": self.error,
            "log": self.log,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """One checkpoint and every server that was started for it.

    Attributes:
        role: the checkpoint that is judged, or the source it is judged against.
        path: what the user named.
        as_served: the files themselves, or a BF16 copy of the same weights where this CPU has no kernel for them.
        reason: why a copy was served, and what that leaves unjudged; "" for native.
        dtype: what its weights are stored as, largest share first ("fp8_channel, plain").
        num_bytes: of its safetensors entries, before any copy.
        runs: by k, ascending.
    """

    role: Role
    path: str
    as_served: AsServed
    reason: str
    dtype: str
    num_bytes: int
    runs: tuple[Run, ...]

    def run(self, k: int) -> Run | None:
        """The server with k speculative tokens, if one was started."""
        return next((run for run in self.runs if run.k == k), None)

    def as_dict(self) -> dict[str, Any]:
        """For report.json."""
        return {
            "role": self.role,
            "path": self.path,
            "as_served": self.as_served,
            "reason": self.reason,
            "dtype": self.dtype,
            "num_bytes": self.num_bytes,
            "runs": [run.as_dict() for run in self.runs],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """One question and its answer.

    Attributes:
        name: "loads", "acceptance" or "equality".
        verdict: "not judged" where there was nothing to compare with.
        says: the answer in a sentence, with the numbers.
    """

    name: Literal["loads", "acceptance", "equality"]
    verdict: Verdict
    says: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeReport:
    """Everything `keepmtp serve-check` found out.

    Attributes:
        checkpoint: the checkpoint that is judged.
        source: what it is judged against; None where the user had none.
        floor: least acceptance as a share of the source's.
        prompts: what was asked.
        max_tokens: limit of tokens a prompt.
        environment: versions and device, words by name ("vllm": "0.32.0", "device": "CPU ...").
        seconds: wall time of the whole check.
    """

    checkpoint: Served
    source: Served | None
    floor: float
    prompts: tuple[str, ...]
    max_tokens: int
    environment: dict[str, str]
    seconds: float

    @property
    def served(self) -> tuple[Served, ...]:
        """Source first, then the checkpoint."""
        return (self.checkpoint,) if self.source is None else (self.source, self.checkpoint)

    @property
    def gates(self) -> tuple[Gate, ...]:
        """Loads, acceptance, equality, in this order."""
        return (_loads(self.served), _acceptance(self.checkpoint, self.source, self.floor), _equality(self.served))

    @property
    def ok(self) -> bool:
        """No gate failed."""
        return all(gate.verdict != "failed" for gate in self.gates)

    def as_dict(self) -> dict[str, Any]:
        """The form of report.json."""
        return {
            "ok": self.ok,
            "gates": [{"name": gate.name, "verdict": gate.verdict, "says": gate.says} for gate in self.gates],
            "floor": self.floor,
            "source": self.source.as_dict() if self.source else None,
            "checkpoint": self.checkpoint.as_dict(),
            "prompts": list(self.prompts),
            "max_tokens": self.max_tokens,
            "environment": self.environment,
            "seconds": self.seconds,
        }


def partings(plain: Sequence[Output], drafted: Sequence[Output]) -> tuple[Parting, ...]:
    """The prompts whose greedy output is not that of k=0, each at its first differing token.

    Args:
        plain: outputs of k=0, with log-probabilities.
        drafted: outputs of k>0 for the same prompts.
    """
    found = []
    for number, (before, after) in enumerate(zip(plain, drafted, strict=True)):
        if before.token_ids == after.token_ids:
            continue
        pairs = enumerate(zip(before.token_ids, after.token_ids, strict=False))
        at = next((i for i, (a, b) in pairs if a != b), min(len(before.token_ids), len(after.token_ids)))
        plain_token, token = _at(before.token_ids, at), _at(after.token_ids, at)
        top = before.top_logprobs[at] if at < len(before.top_logprobs) else {}
        known = plain_token in top and token in top
        gap = top[plain_token] - top[token] if known else None  # type: ignore[index]
        found.append(Parting(prompt=number, at=at, plain_token=plain_token, token=token, gap=gap))
    return tuple(found)


def _at(ids: Sequence[int], index: int) -> int | None:
    return ids[index] if index < len(ids) else None


def _loads(served: Iterable[Served]) -> Gate:
    failed = [f"{one.role} with k={run.k}: {run.error}" for one in served for run in one.runs if not run.loaded]
    unwritten = [
        f"{one.role} with k={run.k}: no tensor wrote the {'draft' if run.k else 'model'}'s {run.unwritten[0]}"
        f"{_more(len(run.unwritten))}"
        for one in served
        for run in one.runs
        if run.unwritten
    ]
    if failed or unwritten:
        return Gate(name="loads", verdict="failed", says="; ".join(failed + unwritten) + ".")
    return Gate(name="loads", verdict="passed", says="Every server came up with every weight written.")


def _acceptance(checkpoint: Served, source: Served | None, floor: float) -> Gate:
    if source is None:
        says = "No source to compare with: acceptance alone does not tell a damaged draft from a hard text."
        return Gate(name="acceptance", verdict="not judged", says=says)
    verdict: Verdict = "not judged"
    says = []
    for run in checkpoint.runs:
        original = source.run(run.k)
        if run.k == 0 or not run.loaded or original is None or not original.loaded:
            continue
        mine, theirs = run.drafts.acceptance, original.drafts.acceptance
        if not theirs:
            says.append(f"k={run.k}: the source itself had no draft accepted")
            verdict = "failed"
            continue
        ratio = (mine or 0.0) / theirs
        good = ratio >= floor
        verdict = "failed" if verdict == "failed" or not good else "passed"
        says.append(
            f"k={run.k}: {100 * (mine or 0.0):.1f} % of {run.drafts.draft_tokens} drafted tokens against the source's "
            f"{100 * theirs:.1f} % of {original.drafts.draft_tokens}, {100 * ratio:.1f} % of it, "
            f"{'at least' if good else 'below'} the floor of {100 * floor:g} %"
            f"{_uncertainty(run.drafts, original.drafts, ratio, floor)}"
        )
    if not says:
        return Gate(name="acceptance", verdict="not judged", says="No k > 0 was served for both.")
    return Gate(name="acceptance", verdict=verdict, says="; ".join(says) + ".")


def _uncertainty(mine: Drafts, theirs: Drafts, ratio: float, floor: float) -> str:
    """Said where chance could turn the verdict: fewer than two standard errors between ratio and floor.

    Drafted tokens are taken as independent trials, which makes the error a little too small.
    """
    if min(mine.draft_tokens, theirs.draft_tokens) < FEW_DRAFTS:
        return f" (few drafted tokens: fewer than {FEW_DRAFTS})"
    shares = [(drafts.acceptance or 0.0, drafts.draft_tokens) for drafts in (mine, theirs)]
    relative = math.sqrt(sum((1 - share) / (share * count) for share, count in shares if share))
    error = ratio * relative
    return f" (standard error {100 * error:.1f} points: ask more prompts)" if 0 < abs(ratio - floor) < 2 * error else ""


def _equality(served: Iterable[Served]) -> Gate:
    compared, near, far = 0, 0, []
    for one in served:
        for run in one.runs:
            if run.partings is None:
                continue
            compared += len(run.outputs)
            near += sum(parting.is_near_tie for parting in run.partings)
            far += [(one, run, parting) for parting in run.partings if not parting.is_near_tie]
    if not compared:
        return Gate(name="equality", verdict="not judged", says="No output with and without drafting to compare.")
    ties = f", {near} part at a near-tie (gap up to {GAP_TOLERANCE:g})" if near else ""
    equal = f"{compared - near - len(far)} of {compared} outputs equal those without drafting{ties}"
    if not far:
        return Gate(name="equality", verdict="passed", says=f"{equal}.")
    one, run, parting = far[0]
    gap = "unknown, more than the likeliest few" if parting.gap is None else f"{parting.gap:.3f}"
    says = (
        f"{equal}; {one.role} with k={run.k} leaves it in prompt {parting.prompt} at token {parting.at}: "
        f"{parting.token} instead of {parting.plain_token}, log-probability gap {gap}{_more(len(far))}."
    )
    return Gate(name="equality", verdict="failed", says=says)


def _more(count: int) -> str:
    return f" and {count - 1} more" if count > 1 else ""
