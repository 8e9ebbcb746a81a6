"""report.json, version 12: everything that was found about one checkpoint.

In and out: the file itself. `report.py` fills it, and `validate/report/card.py` makes the model
card from it and from nothing else.

    schema, keepmtp, vllm, made_at   12, what wrote it, the vLLM that judged, when (UTC)
    path                             the checkpoint
    facts                            family, dialect, counts, bytes, forms of the MTP block
    findings [...]                   origin, severity, where, says, cure, rule, count
    dry [...]                        a version, GPU and TP each: vllm, gpu, tp, k, ok, error, ...
    calibration {...}                what keepmtp.json says: data, coverage, acceptance, candidates
    serve {...}                      what real servers did: source, checkpoint, runs by k
    evaluation {...}                 tasks of source and checkpoint, paired, with draft counters
    lossless {...}                   faults and changed texts with MTP on and off, by k and way
    bench {...}                      tokens a second by k and load, and the recommended k
    closeness {...}                  divergence and flips between the served source and checkpoint
    judgement {...}                  the gates: pass, regression or infeasible, with a reason each
    identity {...}                   the bytes that all of this was measured on, file by file
    results {file: sha256}           result files in the same folder with the same numbers
    absent {part: sentence}          why the calibration is empty
    target {path, revision, sha256}  of a draft of its own alone: what it was judged and served with

Easy to get wrong: a field that is added, renamed or read otherwise is a new version; unknown fields
are refused, so that a page never leaves out what it does not know.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import ConfigDict, Field, create_model

from ...checkpoints.identity import Identity
from ...recipes.protocol import Gates
from .results import MEASURED, CheckData, in_order
from .settle import HasVerdict, ReasonFact

T = TypeVar("T")


class JudgementFact(HasVerdict):
    """The recipe's gates together: the worst of the reasons, regression before infeasible before
    pass.
    """

    gates: Gates
    reasons: Annotated[tuple[ReasonFact, ...], Field(min_length=1)]

    @property
    def says(self) -> str:
        """What decides it: the first reason with this verdict, or that of acceptance."""
        says = {one.gate: one.says for one in self.reasons if one.verdict == self.verdict}
        return says.get("acceptance", next(iter(says.values())))


# A part for each station that measures.
_PARTS: Any = {kind.part: (kind | None, None) for kind in MEASURED}
_Measured = create_model("_Measured", __base__=CheckData, **_PARTS)


class FullReport(_Measured):
    """The file; see the module's docstring."""

    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True)

    version: Literal[12] = Field(default=12, alias="schema")
    keepmtp: str
    vllm: str
    made_at: str
    judgement: JudgementFact
    identity: Identity | None = None
    results: Mapping[str, str] = Field(default_factory=dict)

    @property
    def parts(self) -> list[Any]:
        """What was measured with servers."""
        return in_order(dict(self))

    def of(self, kind: type[T]) -> T | None:
        """What one station measured."""
        for part in self.parts:
            if isinstance(part, kind):
                return part
        return None
