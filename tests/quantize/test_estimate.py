"""What is counted of a run's time, against torch's own counter and against the source's headers."""

import sys

import pytest
import torch
from keepmtp.quantize.calibrate.layers.forwards import propagating
from keepmtp.quantize.calibrate.model.skeleton import Batch, Skeleton
from keepmtp.quantize.needs.cards import CARDS
from keepmtp.quantize.needs.estimate import LINK_BYTES_A_SECOND, estimate, layer_work
from passes import ROOT, plan_over
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(ROOT / "benchmarks"))
from counted import PAGE, air, table, with_table

BATCH, LENGTH = 2, 64


@pytest.mark.parametrize("index", [0, 1])
def test_operations_are_those_that_torch_counts(index):
    """A dense layer, and one with experts, each on every token; torch counts no element-wise operation."""
    plan = plan_over(ROOT / "models" / "tiny-glm4-moe", "tiny-glm4-moe.nvfp4")
    skeleton = Skeleton(plan, device=torch.device("cpu"))
    ids = torch.randint(3, 300, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    state = (torch.randn(BATCH, LENGTH, 256, generator=torch.Generator().manual_seed(1)).bfloat16(),)
    tensors = [t for t in plan.tensors if t.part == "backbone" and t.layer == index]
    with skeleton.layer(index), propagating(skeleton.model), FlopCounterMode(display=False) as counter:
        for arguments in skeleton.feed(index, [Batch(ids=ids, state=state)]):
            skeleton.model(**arguments, use_cache=False)
    counted = layer_work(plan, tensors, batch_size=BATCH, length=LENGTH)
    # The rotary embedding multiplies positions by frequencies, once for the whole model.
    assert counter.get_total_flops() == pytest.approx(counted.flops, rel=0.005)


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    return air(tmp_path_factory.mktemp("air"))


@pytest.mark.full
def test_bytes_are_those_of_the_headers(plan):
    found = {(term.station, term.name): term for term in estimate(plan, CARDS["H200"], batch_size=16).terms}
    layers = [f"model.layers.{index}." for index in range(46)]
    stored = sum(entry.num_bytes for name, entry in plan.source.entries.items() if name.startswith(tuple(layers)))
    states = 2 * (256 + 2 * 16) * 2048 * 4096 * 46
    assert found["layers", "disk"].count == stored + states
    assert found["layers", "link"].seconds == (stored + 2 * states) / LINK_BYTES_A_SECOND
    assert found["packing", "disk"].count == plan.num_bytes_before + 2 * plan.num_bytes_after
    assert found["layers", "calls"].count > 45 * 128 * 3 * 256 / 16


def test_the_longest_term_rules(plan):
    by_one, by_many = (estimate(plan, CARDS["H200"], batch_size=size) for size in (1, 16))
    assert (by_one.ruling.station, by_one.ruling.name) == ("layers", "calls")
    assert (by_many.ruling.station, by_many.ruling.name) == ("layers", "compute")
    assert by_many.seconds < 15 * 60, "what is promised of GLM-4.5-Air on one H200"


def test_the_table_is_what_is_made_today(plan):
    text = PAGE.read_text()
    assert text == with_table(text, table(plan)), "run `python benchmarks/counted.py --write`"
