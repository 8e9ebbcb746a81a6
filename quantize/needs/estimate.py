"""How long a run takes, counted: operations, bytes and calls of each station, over what a machine does a second.

In: a plan, a card, how many of them, and a batch size. Out: `TimeTerm`s in seconds; those of one station overlap or
follow each other as the pipeline does it.

Easy to get wrong: calibration computes every expert on every token, so its operations are those of all parameters, not
of the active ones. And a GPU waits for Python: with 128 experts and batches of one sequence, calls rule.

Source: rates of cards in cards.py; passes in calibrate/backbone.py; HOST_SECONDS_A_CALL by benchmarks/counted.py. The
shares of a peak that are reached, and the rate of a disk, are assumed.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import prod

from ...recipes.knobs import AutoRoundKnobs
from ...recipes.schema import AUTO, Calibration, candidates_for
from ...recipes.schemes import SCHEMES, SEARCHES, SWEEPS
from ..plan.choices import rows_looked_at
from ..plan.plan import Plan
from ..plan.tensor_plan import TensorPlan
from .cards import Card

MATMUL_SHARE = 0.6
"""Of a card's peak that large BF16 products reach. Assumed."""
BANDWIDTH_SHARE = 0.75
"""Of a card's bandwidth that element-wise kernels reach. Assumed."""
DISK_BYTES_A_SECOND = 2e9
"""A local NVMe disk, read or written in large pieces. Assumed."""
HOST_SECONDS_A_CALL = 1.0e-4
"""Python and launches for one module in a calibrating batch: benchmarks/counted.py measures 4e-5 to 7e-5 on a CPU, and
launches of a GPU are assumed to add the rest."""
LINK_BYTES_A_SECOND = 25e9
"""Between main memory and a card, pinned. Assumed; half of PCIe 5 x16."""
START_SECONDS = 60.0
"""Imports, tokens of the text, the static check and the card's first kernels. Assumed."""
MOST_PLANS = 4
"""That a search measures: what it found, the best single word, and the block as large and as small as can be."""
SEARCH_READS = 3
"""How often a search reads the decoder layers: forward, backward, and for the plans."""
# BF16 bytes that move for one score: product, scale, mask, softmax in F32, cast, and the product with the values.
_BYTES_A_SCORE = 24
# The same for a value between an expert's projections, for one that an expert returns, and for one that is observed.
_BYTES_INSIDE, _BYTES_OUTSIDE, _BYTES_OBSERVED = 26, 12, 2
_BYTES_PACKED = 30
# Times as long with searched scales, on a CPU (`make bench`); and what squaring an input takes.
_SEARCHED, _BYTES_SQUARED = 4, 18


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeTerm:
    """Seconds of one station for one reason.

    Attributes:
        station: search, layers, MTP block, packing, or start.
        name: compute, memory, calls, disk or link.
        count: what is counted, in its unit.
        rate: how much of that there is a second.
        source: where the rate is from.
    """

    station: str
    name: str
    count: float
    unit: str
    rate: float
    source: str

    @property
    def seconds(self) -> float:
        """How long it takes alone."""
        return self.count / self.rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The terms of a run, and how long it takes together."""

    terms: tuple[TimeTerm, ...]

    def seconds_of(self, station: str) -> float:
        """The station's time: a GPU computes while Python calls ahead and a thread reads; so the longest counts."""
        own = {term.name: term.seconds for term in self.terms if term.station == station}
        return max(own.get("compute", 0.0) + own.get("memory", 0.0), *own.values())

    @property
    def seconds(self) -> float:
        """Of all stations, one after the other."""
        return sum(self.seconds_of(station) for station in dict.fromkeys(term.station for term in self.terms))

    @property
    def ruling(self) -> TimeTerm:
        """The longest term of the longest station, among those that decide its time."""
        station = max(dict.fromkeys(term.station for term in self.terms), key=self.seconds_of)
        own = {term.name: term for term in self.terms if term.station == station}
        longest = max(own.values(), key=lambda term: term.seconds)
        if longest.seconds == self.seconds_of(station):
            return longest
        return max(own["compute"], own["memory"], key=lambda term: term.seconds)


def estimate(plan: Plan, card: Card, *, gpus: int = 1, batch_size: int = 1) -> Estimate:
    """The time of a run on GPUs of one machine.

    Args:
        plan: what is done.
        card: with known rates.
        gpus: processes that share the batches, a GPU each.
        batch_size: sequences in a batch.
    """
    terms = [TimeTerm(station="start", name="calls", count=START_SECONDS, unit="s", rate=1.0, source="assumed")]
    if plan.needs_calibration or plan.recipe.measures_mtp or plan.recipe.is_searched:
        calibration = plan.recipe.calibration
        assert calibration is not None
        work = _Work(plan=plan, calibration=calibration, batch_size=batch_size, gpus=gpus)
        if plan.recipe.is_searched:
            terms += _terms(work.search(), "search", card)
            read = SEARCH_READS * work.source_bytes
            terms += [_disk("search", read), _link("search", read)]
        terms += _terms(work.layers(), "layers", card)
        terms += [
            _disk("layers", work.source_bytes + work.state_bytes),
            _link("layers", work.source_bytes + 2 * work.state_bytes / gpus),
        ]
        terms += _terms(work.block(), "MTP block", card)
    terms += _packing(plan, card, gpus)
    return Estimate(terms=tuple(terms))


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Operations, bytes that move on the card, and calls of modules."""

    flops: float = 0.0
    moved: float = 0.0
    calls: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(flops=self.flops + other.flops, moved=self.moved + other.moved, calls=self.calls + other.calls)

    def times(self, factor: float) -> "Work":
        """This work as often."""
        return Work(flops=self.flops * factor, moved=self.moved * factor, calls=self.calls * factor)


def layer_work(
    plan: Plan,
    tensors: Iterable[TensorPlan],
    *,
    batch_size: int,
    length: int,
    routed: bool = False,
    squares: bool = False,
) -> Work:
    """One batch through one layer.

    Args:
        plan: of the model.
        tensors: the layer's.
        batch_size: sequences.
        length: tokens in each.
        routed: experts compute their own tokens only, as a server's do.
        squares: inputs of experts are squared, for their importance.
    """
    heads, hidden = plan.view.number("num_attention_heads"), plan.view.number("hidden_size")
    tokens = batch_size * length
    matrices = [tensor for tensor in tensors if len(tensor.shape) > 1]
    inner = max((t.shape[1] for t in matrices if t.role == "attention" and t.shape[0] == hidden), default=0)
    share = _routed_share(plan, matrices) if routed else 1.0
    plain = sum(prod(tensor.shape) for tensor in matrices if tensor.role != "experts")
    experts = sum(prod(tensor.shape) for tensor in matrices if tensor.role == "experts")
    # Query and key are as wide as value and output here; latent attention's are a half wider.
    flops = 2.0 * tokens * (plain + share * experts) + 4.0 * tokens * length * inner
    widths = Counter[int]()
    for tensor in (tensor for tensor in matrices if tensor.role == "experts"):
        widths[min(tensor.shape[-2:])] += tensor.shape[0] if tensor.stacked else 1
    # Three matrices an expert, or two stacks.
    num_experts = sum(widths.values()) / (2 if any(tensor.stacked for tensor in matrices) else 3)
    inside = max(widths, default=0)
    keeps_scores = plan.recipe.calibration is None or plan.recipe.calibration.attention == "eager"
    moved = 2.0 * (plain + experts) + _BYTES_A_SCORE * float(tokens) * heads * length * keeps_scores
    moved += share * tokens * num_experts * (inside * _BYTES_INSIDE + hidden * _BYTES_OUTSIDE)
    moved += share * tokens * num_experts * inside * (_BYTES_OBSERVED + squares * _BYTES_SQUARED)
    return Work(flops=flops, moved=moved, calls=len(matrices) + 2 * num_experts * any(t.stacked for t in matrices))


@dataclass(frozen=True)
class _Work:
    """What all batches of a run cost one process."""

    plan: Plan
    calibration: Calibration
    batch_size: int
    gpus: int

    @cached_property
    def source_bytes(self) -> int:
        """Of the backbone's decoder layers, as stored; several processes of a machine read them from one disk once."""
        layers = [tensor for tensor in self.plan.tensors if tensor.part == "backbone" and tensor.layer is not None]
        return sum(self.plan.entries[name].num_bytes for tensor in layers for name in tensor.inputs)

    @cached_property
    def _by_layer(self) -> dict[int, list[TensorPlan]]:
        """The backbone's tensors that are loaded."""
        layers: dict[int, list[TensorPlan]] = {}
        for tensor in self.plan.tensors:
            if tensor.part == "backbone" and tensor.layer is not None and tensor.fate not in ("drop", "add"):
                layers.setdefault(tensor.layer, []).append(tensor)
        return layers

    @property
    def state_bytes(self) -> int:
        """What all decoder layers together write: each stream once."""
        streams = 2 if self.plan.may_calibrate_mtp else 1
        sequences = streams * self.calibration.samples + 2 * self.calibration.held_out
        tokens = sequences * self.calibration.sequence_length
        return 2 * tokens * _hidden(self.plan) * self.plan.view.num_layers

    def layers(self) -> Work:
        """All decoder layers: the calibration text, and as a server computes, the held-out text twice.

        For an MTP block that may be calibrated, a server's forward of the calibration text, too.
        """
        return sum(map(self._layer, self._by_layer.values()), Work())

    def search(self) -> Work:
        """The sweeps and the plans of `backbone: auto`, at most: the released model and each plan on held-out text.

        A gradient takes twice what a forward does. The error of a word is two products of weights and gradients, as
        much as a forward, and the first one of the released weights is the same for all words.
        """
        recipe = self.plan.recipe
        assert recipe.backbone_auto is not None
        rows, length = rows_looked_at(recipe), self.calibration.sequence_length
        measured = self.calibration.held_out if recipe.backbone_auto.min_acceptance else rows
        words = sum(word in SCHEMES for word in recipe.backbone_auto.candidates)
        forwards = rows * (4 + 1 + words) + measured * (1 + MOST_PLANS)
        work = Work()
        for tensors in self._by_layer.values():
            one = layer_work(self.plan, tensors, batch_size=1, length=length, routed=True)
            matrices = sum(prod(tensor.shape) for tensor in tensors if len(tensor.shape) > 1)
            rounded = Work(moved=float(_BYTES_PACKED * matrices * (words + MOST_PLANS)))
            work += one.times(forwards / self.gpus) + rounded
        return work

    def block(self) -> Work:
        """The MTP block, once a policy that is tried: its own batches, and three steps over the held-out text."""
        if self.plan.view.family.draft is None:
            return Work()
        own = [t for t in self.plan.tensors if t.part == "mtp" and t.role not in ("embedding", "head")]
        auto = self.plan.recipe.mtp_auto
        groups = {tensor.role for tensor in own}
        policies = len(candidates_for(auto.candidates, groups)) if auto and self.plan.recipe.mtp == AUTO else 1
        head = sum(
            prod(tensor.shape) for tensor in self.plan.tensors if tensor.role == "head" and tensor.part == "backbone"
        )
        length = self.calibration.sequence_length
        tokens = self.calibration.held_out * length
        heads = Work(
            flops=2.0 * tokens * head * 3,
            moved=10.0 * tokens * head / max(1, _hidden(self.plan)),
            calls=tokens / length,
        )
        drafts = layer_work(self.plan, own, batch_size=1, length=length, routed=True).times(
            3 * self.calibration.held_out
        )
        calibrated = self._passes(own) if any(t.calibrated for t in own) or self.plan.recipe.measures_mtp else Work()
        measured = (heads + drafts).times((policies + 2) / self.gpus) + calibrated.times(policies)
        return measured + self._training(own, head)

    def _training(self, own: list[TensorPlan], head: int) -> Work:
        """`mtp: tuned`: each draft step forward and back, which is three times a forward, and the head's logits."""
        tuned = self.plan.recipe.mtp_tuned
        if tuned is None:
            return Work()
        length = self.calibration.sequence_length
        drafts = layer_work(self.plan, own, batch_size=1, length=length, routed=True).times(3 * tuned.draft_steps)
        logits = Work(flops=6.0 * length * head * tuned.draft_steps, calls=2.0 * tuned.draft_steps)
        packed = Work(moved=_packed_bytes(self.plan, [tensor for tensor in own if tensor.tuned]))
        sequences = tuned.steps * tuned.batch_size / self.gpus
        return (drafts + logits).times(sequences) + packed.times(tuned.steps)

    def _layer(self, tensors: list[TensorPlan]) -> Work:
        served = layer_work(
            self.plan, tensors, batch_size=self.batch_size, length=self.calibration.sequence_length, routed=True
        )
        mtp_stream = self._batches(self.calibration.samples) if self.plan.may_calibrate_mtp else 0
        rounded = Work(moved=_packed_bytes(self.plan, [t for t in tensors if t.fate == "quantize"]))
        return self._passes(tensors) + rounded + served.times(2 * self._batches(self.calibration.held_out) + mtp_stream)

    def _passes(self, tensors: list[TensorPlan]) -> Work:
        """The calibration text, twice where an algorithm rewrites weights of the layer; AutoRound's steps."""
        one = layer_work(
            self.plan,
            tensors,
            batch_size=self.batch_size,
            length=self.calibration.sequence_length,
            routed=self.calibration.experts == "routed",
            squares=any(tensor.weighted for tensor in tensors if tensor.role == "experts"),
        )
        is_rewritten = self.calibration.algorithm not in SWEEPS
        passes = 2 if is_rewritten and any(t.calibrated == "weights" or t.may_change for t in tensors) else 1
        if self.calibration.algorithm == "autoround" and passes > 1:
            # What the layer returns before and after; and steps, whose gradient takes twice what a forward does.
            knobs = self.calibration.autoround or AutoRoundKnobs()
            passes += 2
            steps = 3 * knobs.iters * knobs.batch_size / self.batch_size
            return one.times(passes * self._batches(self.calibration.samples) + steps)
        return one.times(passes * self._batches(self.calibration.samples))

    def _batches(self, samples: int) -> float:
        """Of one process; a last batch may be smaller."""
        return samples / self.batch_size / self.gpus


def _terms(work: Work, station: str, card: Card) -> list[TimeTerm]:
    return [
        TimeTerm(
            station=station,
            name="compute",
            count=work.flops,
            unit="FLOP",
            rate=card.flops * MATMUL_SHARE,
            source=f"{card.name}'s peak, of which {MATMUL_SHARE:.0%} are assumed",
        ),
        _memory(station, card, 1, work.moved),
        TimeTerm(
            station=station,
            name="calls",
            count=work.calls,
            unit="modules",
            rate=1 / HOST_SECONDS_A_CALL,
            source="benchmarks/counted.py, and launches assumed",
        ),
    ]


def _packed_bytes(plan: Plan, tensors: Iterable[TensorPlan]) -> float:
    """What packing these weights moves, and in proportion what a search of their scales takes."""
    searched = SEARCHES[plan.recipe.search] if plan.recipe.search else frozenset()
    return float(
        sum(_BYTES_PACKED * prod(each.shape) * (_SEARCHED if each.scheme in searched else 1) for each in tensors)
    )


def _packing(plan: Plan, card: Card, gpus: int) -> list[TimeTerm]:
    """Source read, packed and written; then what was written is read for its check."""
    packed = _packed_bytes(plan, [tensor for tensor in plan.tensors if tensor.fate == "quantize"])
    return [
        _memory("packing", card, gpus, packed),
        _disk("packing", plan.num_bytes_before + 2 * plan.num_bytes_after),
        _link("packing", (plan.num_bytes_before + plan.num_bytes_after) / gpus),
    ]


def _memory(station: str, card: Card, gpus: int, count: float) -> TimeTerm:
    return TimeTerm(
        station=station,
        name="memory",
        count=count,
        unit="B",
        rate=gpus * card.bandwidth * BANDWIDTH_SHARE,
        source=f"{card.name}'s bandwidth, of which {BANDWIDTH_SHARE:.0%} are assumed",
    )


def _disk(station: str, count: float) -> TimeTerm:
    rate = DISK_BYTES_A_SECOND
    return TimeTerm(station=station, name="disk", count=count, unit="B", rate=rate, source="assumed, an NVMe disk")


def _link(station: str, count: float) -> TimeTerm:
    rate = LINK_BYTES_A_SECOND
    return TimeTerm(station=station, name="link", count=count, unit="B", rate=rate, source="assumed, pinned memory")


def _routed_share(plan: Plan, matrices: Iterable[TensorPlan]) -> float:
    """Of a layer's experts, those that compute a token."""
    chosen = plan.view.number("num_experts_per_tok", "moe_topk") or 1
    routers = [tensor.shape for tensor in matrices if tensor.role == "router" and len(tensor.shape) == 2]
    experts = max((count for count, width in routers if width > chosen), default=chosen)
    return min(1.0, chosen / experts)


def _hidden(plan: Plan) -> int:
    return plan.view.number("hidden_size") or 1
