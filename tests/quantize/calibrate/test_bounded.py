"""What GPTQ and AWQ keep of a layer: one Hessian for each input, and experts in groups that fit;
bit for bit.
"""

from functools import cache
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from keepmtp.quantize.calibrate.layers import awq, gptq
from keepmtp.quantize.calibrate.layers.awq import _Cache
from keepmtp.quantize.calibrate.layers.gptq import Hessians
from keepmtp.quantize.calibrate.layers.layer import Calibrated
from keepmtp.quantize.calibrate.layers.observed import InputIdentity
from keepmtp.quantize.needs.memory import awq_cache_bytes, hessian_bytes
from keepmtp.quantize.plan.tensor_plan import TensorPlan
from keepmtp.recipes.errors import CheckpointError
from layerwise import IGNORE, Skeleton, assert_same, layerwise, sequential
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.gptq.helpers import accumulate_hessian, make_empty_hessian
from passes import plan_over
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

GLM = Path(__file__).parents[3] / "models" / "tiny-glm4-moe"


def token_ids(samples: int = 3, length: int = 32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 500, (2, length), generator=generator) for _ in range(samples)]


def hidden(samples: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 32, 256, generator=generator).bfloat16() for _ in range(samples)]


def moe_layer(
    scheme: str = "W4A16",
    algorithm: str = "gptq",
    *,
    unused: int | None = None,
    share: tuple[int, int] = (0, 1),
    **options,
) -> Calibrated:
    """A layer of four experts and a shared one; the router sends nothing to the expert `unused`.

    Args:
        share: batches from this one on, and every how many of them.
    """
    skeleton = Skeleton(GLM)
    mine = slice(share[0], None, share[1])
    batches = skeleton.enter(1, token_ids()[mine], hidden()[mine])
    if unused is not None:
        skeleton.layers[1].mlp.gate.e_score_correction_bias.data[unused] = -1e4
    return skeleton.calibrated(batches, scheme, algorithm=algorithm, **options)


def summed(module: nn.Module, values: list[Tensor]) -> Tensor:
    """The library's own sum."""
    matrix = make_empty_hessian(module)
    for value in values:
        accumulate_hessian(value, module, matrix, torch.zeros(()))
    return matrix


def hessians_of(modules: list[nn.Linear]) -> Hessians:
    return Hessians({module: str(number) for number, module in enumerate(modules)})


def num_matrices(found: Hessians) -> int:
    return len({id(own) for own in found.sums.values()})


@cache
def unbounded(
    scheme: str = "W4A16", algorithm: str = "gptq", *, unused: int | None = None, **options
) -> Calibrated:
    """The same where everything fits, as it does here; with a `room` it is to be asked for
    before.
    """
    return moe_layer(scheme, algorithm, unused=unused, **options)


@pytest.fixture
def most(monkeypatch) -> list[int]:
    """Matrices in memory after each call of a module."""
    counts: list[int] = []
    add = Hessians.add

    def counted(self, module, args):
        add(self, module, args)
        counts.append(num_matrices(self))

    monkeypatch.setattr(Hessians, "add", counted)
    return counts


@pytest.mark.parametrize("scheme", ["W4A16", "NVFP4"])
def test_a_moe_layer_needs_a_hessian_for_each_input(scheme, most, monkeypatch):
    """q, k, v share one, all gate and up projections share one; o and each of five down projections
    have their own.
    """
    factored: list[int] = []
    factorize = gptq.factorize_hessian
    monkeypatch.setattr(
        gptq, "factorize_hessian", lambda *a: factored.append(len(a[1])) or factorize(*a)
    )
    shared = moe_layer(scheme)
    assert max(most) == 8
    # The shared expert reads sequences and the routed ones rows: one sum, divided by two numbers of
    # samples.
    assert factored == [1] * 9
    most.clear()
    with monkeypatch.context() as patch:
        patch.setattr(InputIdentity, "__eq__", lambda one, other: one is other)
        apart = moe_layer(scheme)
    assert max(most) == 4 + 3 * 5
    assert len(factored) == 9 + 19
    assert shared.tensors.keys() == apart.tensors.keys()
    for name, value in shared.tensors.items():
        assert torch.equal(value, apart.tensors[name]), name


def testsums_stay_together_while_inputs_do():
    modules = [nn.Linear(8, 4) for _ in range(4)]
    found, first = hessians_of(modules), torch.randn(2, 5, 8)
    values = [first, *torch.randn(2, 2, 5, 8)]
    found.add(modules[3], (first.flip(0),))
    for value in values:
        for module in modules[:3]:
            found.add(module, (value,))
    assert found.uncalled() == [] and num_matrices(found) == 2
    assert found.sums[modules[0]].matrix is found.sums[modules[2]].matrix
    assert (
        torch.equal(found.sums[modules[1]].matrix, summed(modules[1], values))
        and found.sums[modules[1]].samples[modules[1]] == 6
    )


@pytest.mark.parametrize(
    "calls", [[(0, "b"), (1, "c")], [(0, "b")], [(1, "a")], [(0, "b"), (1, "b"), (1, "b")]]
)
def test_modules_that_part_are_refused(calls):
    """Both read one tensor first; afterwards one reads another, or nothing, or once more."""
    modules, values = (
        [nn.Linear(8, 4) for _ in range(2)],
        {name: torch.randn(2, 5, 8) for name in "abc"},
    )
    found = hessians_of(modules)
    with pytest.raises(
        CheckpointError, match=r"^1: GPTQ needs it to read what 0 reads in every batch"
    ):
        for number, name in [(0, "a"), (1, "a"), *calls]:
            found.add(modules[number], (values[name],))
        found.uncalled()


def test_memory_that_is_used_again_is_another_input():
    """What the allocator does with the inputs of experts' down projections, and what an operation
    in place does.
    """
    modules = [nn.Linear(64, 4) for _ in range(4)]
    found, expected = hessians_of(modules), []
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
    assert num_matrices(found) == 4


def test_rows_are_the_same_input_whatever_their_batches_are():
    """As a shared expert reads sequences where the routed ones read rows; the library counts the
    former as several.
    """
    routed, shared, other = (nn.Linear(8, 4) for _ in range(3))
    value, found = torch.randn(3, 5, 8), hessians_of([routed, shared, other])
    for module, read in (
        (routed, value.view(-1, 8)),
        (shared, value),
        (other, value.transpose(0, 1)),
    ):
        found.add(module, (read,))
    assert found.sums[routed].matrix is found.sums[shared].matrix and num_matrices(found) == 2
    assert (
        found.sums[routed].samples[routed],
        found.sums[shared].samples[shared],
        found.sums[other].samples[other],
    ) == (1, 3, 5)
    for module, read in (
        (routed, value.view(-1, 8)),
        (shared, value),
        (other, value.transpose(0, 1)),
    ):
        assert torch.equal(found.sums[module].matrix, summed(module, [read]))


# --- experts in groups ----------------------------------------------------------------------------


@pytest.fixture
def room(monkeypatch, request) -> None:
    """What caches may take, in bytes."""
    unbounded(algorithm="awq")
    monkeypatch.setattr(awq, "host_room", lambda: request.param)


@pytest.fixture
def passes(monkeypatch) -> list[int]:
    """One for each further pass."""
    counts: list[int] = []
    for module in (awq, gptq):
        run = module.run_again
        monkeypatch.setattr(
            module, "run_again", lambda *given, run=run: counts.append(1) or run(*given)
        )
    return counts


def assert_equal(found: Calibrated, expected: Calibrated) -> None:
    assert found.tensors.keys() == expected.tensors.keys()
    for name, value in found.tensors.items():
        assert torch.equal(value, expected.tensors[name]), name


PAIR = 3 * 64 * 128 * 2  # a down projection's BF16 inputs of three batches


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("room", "groups"), [(0, 4), (2 * PAIR, 2), (4 * PAIR, 1)], indirect=["room"]
)
def test_awq_searches_experts_in_groups_that_fit(room, groups, passes):
    assert_equal(moe_layer(algorithm="awq"), unbounded(algorithm="awq"))
    assert len(passes) == groups


# --- counted from headers -------------------------------------------------------------------------


def tensors_of_layer(variant: str) -> list[TensorPlan]:
    plan = plan_over(GLM, f"tiny-glm4-moe.{variant}")
    return [tensor for tensor in plan.tensors if tensor.part == "backbone" and tensor.layer == 1]


@pytest.mark.parametrize("routed", [False, True])
def test_hessians_are_as_large_as_counted(routed, monkeypatch):
    sizes, uncalled = [], Hessians.uncalled

    def measured(self):
        matrices = {id(own): own.matrix.nbytes for own in self.sums.values()}
        sizes.append(sum(matrices.values()))
        return uncalled(self)

    monkeypatch.setattr(Hessians, "uncalled", measured)
    tensors = tensors_of_layer("w4a16-gptq")
    schemes = {tensor.module: tensor.scheme for tensor in tensors if tensor.calibrated == "weights"}
    skeleton = Skeleton(GLM)
    batches = skeleton.enter(1, token_ids(), hidden())
    skeleton.calibrated(batches, schemes, algorithm="gptq", routed=routed)
    assert max(sizes) == hessian_bytes(tensors, routed=routed)


def test_awqs_caches_are_as_large_as_counted(monkeypatch):
    """But for the mask and the positions, which attention is handed with its input."""
    kept, append = [], _Cache.append

    def measured(self, values):
        append(self, values)
        if self.is_open:
            kept.extend(leaf.nbytes for leaf in tree_leaves(values) if isinstance(leaf, Tensor))

    monkeypatch.setattr(_Cache, "append", measured)
    moe_layer(algorithm="awq")
    counted = awq_cache_bytes(tensors_of_layer("w4a16-awq"), 3 * 64)
    assert 0.8 < counted / sum(kept) < 1.25
    pairs = counted - awq_cache_bytes(tensors_of_layer("w4a16-awq"), 3 * 64, one_turn=True)
    assert pairs == 3 * PAIR


# --- routed tokens only ---------------------------------------------------------------------------


@pytest.mark.full
def test_routed_experts_are_calibrated_as_llmcompressor_does_without_all_experts():
    ids = token_ids()
    model = sequential(
        GLM, ids, [GPTQModifier(targets="Linear", scheme="W4A16", ignore=IGNORE)], all_experts=False
    )
    _, results = layerwise(GLM, ids, "W4A16", "gptq", routed=True)
    assert assert_same(results, model, all_tensors=True) > 10
    _, everything = layerwise(GLM, ids, "W4A16", "gptq")
    name = "model.layers.1.mlp.experts.0.up_proj.weight_packed"
    assert not torch.equal(results[1].tensors[name], everything[1].tensors[name])


def test_an_expert_without_a_token_takes_all_of_them(passes):
    """Its tensors are those of `all`, to the bit, and the other experts' those of their own
    tokens.
    """
    everything, own = unbounded(unused=3), unbounded(routed=True)
    found = moe_layer(unused=3, routed=True)
    routed = {entry.module: entry.routed for entry in found.coverage}
    tokens = {entry.module: entry.tokens for entry in found.coverage}
    for projection in ("gate_proj", "up_proj", "down_proj"):
        name = f"model.layers.1.mlp.experts.3.{projection}"
        assert routed[name] == tokens[name] == 0
        for suffix in ("weight_packed", "weight_scale"):
            assert torch.equal(
                found.tensors[f"{name}.{suffix}"], everything.tensors[f"{name}.{suffix}"]
            )
        assert not torch.equal(
            found.tensors[f"{name}.weight_packed"], own.tensors[f"{name}.weight_packed"]
        )
        other = f"model.layers.1.mlp.experts.0.{projection}.weight_packed"
        assert not torch.equal(found.tensors[other], everything.tensors[other])
    assert passes == [1]


@pytest.mark.parametrize(("algorithm", "scheme"), [("minmax", "FP8"), ("gptq", "NVFP4")])
def test_a_scale_that_no_token_decides_is_the_other_experts(algorithm, scheme):
    """One input scale for all experts of a layer, as the plan says; the twin has one for each."""
    suffix = {"FP8": "input_scale", "NVFP4": "input_global_scale"}[scheme]
    largest = max if scheme == "FP8" else min
    names = [f"model.layers.1.mlp.experts.{expert}.down_proj" for expert in range(4)]
    found, apart = (
        [
            float(result.tensors[f"{name}.{suffix}"])
            for result in [moe_layer(scheme, algorithm, unused=3, routed=True, experts=experts)]
            for name in names
        ]
        for experts in ([names], [])
    )
    assert {*found} == {largest(apart[:3])} and len({*apart[:3]}) > 1


def test_experts_with_few_tokens_are_named():
    found = moe_layer("FP8", "minmax", routed=True)
    entries = {entry.module: entry for entry in found.coverage}
    gate, down = (
        entries[f"model.layers.1.mlp.experts.0.{projection}"]
        for projection in ("gate_proj", "down_proj")
    )
    assert gate.has_few_tokens == (gate.routed < 256) and down.has_few_tokens == (down.routed < 128)
    assert gate.tokens == gate.routed and gate.has_few_tokens
    assert not entries["model.layers.1.mlp.shared_experts.up_proj"].has_few_tokens
    assert not any(entry.has_few_tokens for entry in moe_layer("FP8", "minmax").coverage)


# --- several ranks --------------------------------------------------------------------------------


def on_rank(rank: int, store: str) -> None:
    """Both see one input in two modules; rank 1 sees a module more."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    modules = [nn.Linear(8, 4) for _ in range(4)]
    a, b, c = torch.randn(3, 2, 5, 8, generator=torch.Generator().manual_seed(0))
    found = hessians_of(modules)
    for number, value in ([(0, a), (1, a)], [(0, b), (1, b), (0, c), (1, c), (2, c)])[rank]:
        found.add(modules[number], (value,))
    found.sum_over_ranks()
    assert [number for number, module in enumerate(modules) if module in found.sums] == [0, 1, 2]
    for module, values in zip(modules[:3], ([a, b, c], [a, b, c], [c]), strict=True):
        torch.testing.assert_close(found.sums[module].matrix, summed(module, values))
        assert found.sums[module].samples[module] == 2 * len(values)
    dist.destroy_process_group()


def groups_on_rank(rank: int, store: str) -> None:
    """Rank 0 has two batches and rank 1 one; of rank 0 no token goes to the last expert."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    moe_layer("W4A16", "gptq", unused=3 if rank == 0 else None, share=(rank, 2), routed=True)
    results = []
    for size in (2**40, 1):
        awq.host_room = lambda size=size: size
        results.append(moe_layer("W4A16", "awq", share=(rank, 2)))
    assert_equal(*results)
    dist.destroy_process_group()


@pytest.mark.few(1)
@pytest.mark.parametrize("on_rank", [on_rank, groups_on_rank])
def test_ranks_agree(on_rank, tmp_path):
    processes = [
        get_context("fork").Process(target=on_rank, args=(rank, str(tmp_path / "store")))
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        process.kill()
    assert [process.exitcode for process in processes] == [0, 0]
