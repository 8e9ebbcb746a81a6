"""What GPTQ and AWQ keep of a layer: one Hessian for each input, and experts in groups that fit;
bit for bit.
"""

from functools import cache
from unittest.mock import Mock

import pytest
import torch
from keepmtp.quantize.calibrate.layers import awq, gptq
from keepmtp.quantize.calibrate.layers.awq import _Cache
from keepmtp.quantize.calibrate.layers.gptq import Hessians
from keepmtp.quantize.calibrate.layers.layer import Calibrated
from keepmtp.recipes.errors import CheckpointError
from layerwise import GLM, Skeleton
from llmcompressor.modifiers.gptq.helpers import accumulate_hessian, make_empty_hessian
from passes import calls_of, plan_over
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

pytestmark = pytest.mark.usefixtures("in_f32")


def moe_layer(scheme: str = "W4A16", algorithm: str = "gptq", **options) -> Calibrated:
    """A layer of four experts and a shared one, on three batches."""
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(3, 500, (2, 32), generator=generator) for _ in range(3)]
    hidden = [torch.randn(2, 32, 256, generator=generator).bfloat16() for _ in range(3)]
    skeleton = Skeleton(GLM)
    batches = skeleton.enter(1, ids, hidden)
    return skeleton.calibrated(batches, scheme, algorithm=algorithm, **options)


def summed(module: nn.Module, values: list[Tensor]) -> Tensor:
    """The library's own sum."""
    matrix = make_empty_hessian(module)
    for value in values:
        accumulate_hessian(value, module, matrix, torch.zeros(()))
    return matrix


def hessians_of(modules: list[nn.Linear]) -> Hessians:
    return Hessians({module: str(number) for number, module in enumerate(modules)})


def matrices(found: Hessians) -> dict[int, int]:
    """Those in memory, and their bytes."""
    return {id(own): own.matrix.nbytes for own in found.sums.values()}


def assert_equal(found: Calibrated, expected: Calibrated) -> None:
    assert found.tensors.keys() == expected.tensors.keys()
    for name, value in found.tensors.items():
        assert torch.equal(value, expected.tensors[name]), name


@pytest.mark.parametrize("scheme", ["W4A16", "NVFP4"])
def test_a_moe_layer_needs_a_hessian_for_each_input(scheme, monkeypatch):
    """q, k, v share one, all gate and up projections share one; o and each of five down projections
    have their own.
    """
    passes = calls_of(monkeypatch, Hessians, "finish")
    factored = calls_of(monkeypatch, gptq, "factorize_hessian")
    shared = moe_layer(scheme)
    # The shared expert reads sequences and the routed ones rows: one sum, divided by two numbers of
    # samples.
    assert [len(hessians) for (_, hessians, *_), _ in factored] == [1] * 9
    with monkeypatch.context() as patch:
        patch.setattr(gptq, "input_identity", lambda _: (object(),))
        apart = moe_layer(scheme)
    num_matrices = [len(matrices(hessians)) for (hessians,), _ in passes]
    assert num_matrices == [8, 4 + 3 * 5] and len(factored) == 9 + 19
    assert_equal(shared, apart)


@pytest.mark.parametrize(
    "calls",
    [
        [[0, "b"], [1, "c"]],
        [[0, "b"]],
        [[1, "a"]],
        [[0, "b"], [1, "b"], [1, "b"]],
    ],
)
def test_modules_that_part_are_refused(calls):
    """Both read one tensor first; afterwards one reads another, or nothing, or once more."""
    modules = [nn.Linear(8, 4) for _ in range(2)]
    values = {name: torch.randn(2, 5, 8) for name in "abc"}
    found = hessians_of(modules)
    rule = r"^1: GPTQ needs it to read what 0 reads in every batch"
    with pytest.raises(CheckpointError, match=rule):
        for number, name in [(0, "a"), (1, "a"), *calls]:
            found.add(modules[number], (values[name],))
        found.finish()


def test_memory_that_is_used_again_is_another_input():
    """What the allocator does with the inputs of experts' down projections, and what an operation
    in place does.
    """
    modules = [nn.Linear(64, 4) for _ in range(4)]
    found = hessians_of(modules)
    expected = []
    for index, module in enumerate(modules[:3]):
        value = torch.full((5, 64), float(index + 1))
        found.add(module, (value,))
        expected.append(summed(module, [value]))
        if index == 2:
            value.mul_(2)
            found.add(modules[3], (value,))
            expected.append(summed(module, [value]))
        del value
    for module, matrix in zip(modules, expected, strict=True):
        assert torch.equal(found.sums[module].matrix, matrix)
    assert len(matrices(found)) == 4


def test_rows_are_the_same_input_whatever_their_batches_are():
    """As a shared expert reads sequences where the routed ones read rows; the library counts the
    former as several.
    """
    value = torch.randn(3, 5, 8)
    modules = [nn.Linear(8, 4) for _ in range(3)]
    found = hessians_of(modules)
    reads = [value.view(-1, 8), value, value.transpose(0, 1)]
    for module, read in zip(modules, reads, strict=True):
        found.add(module, (read,))
    sums = [found.sums[module] for module in modules]
    assert sums[0] is sums[1] is not sums[2]
    assert [own.samples[m] for own, m in zip(sums, modules, strict=True)] == [1, 3, 5]
    for module, read in zip(modules, reads, strict=True):
        assert torch.equal(found.sums[module].matrix, summed(module, [read]))


# --- experts in groups ----------------------------------------------------------------------------


@cache
def unbounded() -> Calibrated:
    """AWQ where everything fits, as it does here."""
    return moe_layer(algorithm="awq")


PAIR = 3 * 64 * 128 * 2  # a down projection's BF16 inputs of three batches


@pytest.mark.few(1)
@pytest.mark.parametrize("room, groups", [(0, 4), (2 * PAIR, 2), (4 * PAIR, 1)])
def test_awq_searches_experts_in_groups_that_fit(room, groups, monkeypatch):
    expected = unbounded()
    monkeypatch.setattr(awq, "host_room", Mock(return_value=room))
    found = calls_of(monkeypatch, awq.BoundedAWQ, "_groups")
    assert_equal(moe_layer(algorithm="awq"), expected)
    assert [len(own) for _, own in found] == [groups]


# --- counted from headers -------------------------------------------------------------------------


def input_widths(variant: str) -> list[int]:
    """The channels of each distinct input of what an algorithm rewrites in a layer of experts."""
    widths = {}
    for tensor in plan_over(GLM, f"tiny-glm4-moe.{variant}").tensors:
        if (tensor.part, tensor.layer, tensor.calibrated) != ("backbone", 1, "weights"):
            continue
        read = tensor.runtime
        if tensor.role == "experts":
            read = tensor.module
        if tensor.role != "attention" and not tensor.module.endswith("down_proj"):
            read = "input of the MLP"
        widths[read] = tensor.shape[-1]
    return [*widths.values()]


def test_hessians_are_as_large_as_counted(monkeypatch):
    """K x K in F32 for each distinct input, not for each module."""
    passes = calls_of(monkeypatch, Hessians, "finish")
    moe_layer()
    (((hessians,), _),) = passes
    counted = 4 * sum(width**2 for width in input_widths("w4a16-gptq"))
    assert sum(matrices(hessians).values()) == counted


def test_awqs_caches_are_as_large_as_counted(monkeypatch):
    """In BF16, but for the mask and the positions, which attention is handed with its input."""
    kept = []
    append = _Cache.append

    def measured(self, values):
        append(self, values)
        if self.is_open:
            kept.extend(leaf.nbytes for leaf in tree_leaves(values) if isinstance(leaf, Tensor))

    monkeypatch.setattr(_Cache, "append", measured)
    moe_layer(algorithm="awq")
    counted = 2 * 3 * 64 * sum(input_widths("w4a16-awq"))
    assert 0.8 < counted / sum(kept) < 1.25
