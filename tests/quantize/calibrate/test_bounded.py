"""What GPTQ and AWQ keep of a layer: one Hessian for each input, and experts in groups that fit;
bit for bit.
"""

from collections.abc import Callable
from functools import cache
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from keepmtp.quantize.calibrate.layers import hessians, layer
from keepmtp.quantize.calibrate.layers.awq import _Cache
from keepmtp.quantize.calibrate.layers.expert_passes import ExpertPasses
from keepmtp.quantize.calibrate.layers.hessians import Hessians
from keepmtp.quantize.calibrate.layers.inputs import InputIdentity
from keepmtp.quantize.calibrate.layers.layer import Calibrated, calibrate
from keepmtp.quantize.calibrate.layers.work import LayerWork
from keepmtp.quantize.needs.memory import awq_cache_bytes, hessian_bytes
from keepmtp.quantize.plan.tensor_plan import TensorPlan
from keepmtp.recipes.errors import CheckpointError
from layerwise import IGNORE, Skeleton, assert_same, layerwise, sequential
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.gptq.helpers import accumulate_hessian, make_empty_hessian
from passes import plan_over
from torch import Tensor, nn

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
    return len({id(own) for own in found._sums.values()})


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

    def counted(self, module, value):
        add(self, module, value)
        counts.append(num_matrices(self))

    monkeypatch.setattr(Hessians, "add", counted)
    return counts


@pytest.mark.parametrize("scheme", ["W4A16", "NVFP4"])
def test_a_moe_layer_needs_a_hessian_for_each_input(scheme, most, monkeypatch):
    """q, k, v share one, all gate and up projections share one; o and each of five down projections
    have their own.
    """
    factored: list[int] = []
    factorize = hessians.factorize_hessian
    monkeypatch.setattr(
        hessians, "factorize_hessian", lambda *a: factored.append(len(a[1])) or factorize(*a)
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


def test_sums_stay_together_while_inputs_do():
    modules = [nn.Linear(8, 4) for _ in range(4)]
    found, first = hessians_of(modules), torch.randn(2, 5, 8)
    values = [first, *torch.randn(2, 2, 5, 8)]
    found.add(modules[3], first.flip(0))
    for value in values:
        for module in modules[:3]:
            found.add(module, value)
    assert found.uncalled() == [] and num_matrices(found) == 2
    assert found.matrix(modules[0]) is found.matrix(modules[2])
    assert (
        torch.equal(found.matrix(modules[1]), summed(modules[1], values))
        and found.samples(modules[1]) == 6
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
            found.add(modules[number], values[name])
        found.uncalled()


def test_memory_that_is_used_again_is_another_input():
    """What the allocator does with the inputs of experts' down projections, and what an operation
    in place does.
    """
    modules = [nn.Linear(64, 4) for _ in range(4)]
    found, expected = hessians_of(modules), []
    for index, module in enumerate(modules[:3]):
        value = torch.full((5, 64), float(index + 1))
        found.add(module, value)
        expected.append(summed(module, [value]))
        if index == 2:
            value.mul_(2)
            found.add(modules[3], value)
            expected.append(summed(module, [value]))
        del value
    for module, matrix in zip(modules, expected, strict=True):
        assert torch.equal(found.matrix(module), matrix)
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
        found.add(module, read)
    assert found.matrix(routed) is found.matrix(shared) and num_matrices(found) == 2
    assert (found.samples(routed), found.samples(shared), found.samples(other)) == (1, 3, 5)
    for module, read in (
        (routed, value.view(-1, 8)),
        (shared, value),
        (other, value.transpose(0, 1)),
    ):
        assert torch.equal(found.matrix(module), summed(module, [read]))


# --- experts in groups
# ------------------------------------------------------------------------------------------------


@pytest.fixture
def room(monkeypatch) -> Callable[[int | None], None]:
    """Sets what statistics may take, in bytes."""
    return lambda size: monkeypatch.setattr(layer, "host_room", lambda: size)


@pytest.fixture
def passes(monkeypatch) -> list[int]:
    """How many experts each further pass is for."""
    counts: list[int] = []
    run = ExpertPasses.run
    monkeypatch.setattr(
        ExpertPasses,
        "run",
        lambda self, chosen, **options: counts.append(len(chosen)) or run(self, chosen, **options),
    )
    return counts


def assert_equal(found: Calibrated, expected: Calibrated) -> None:
    assert found.tensors.keys() == expected.tensors.keys()
    for name, value in found.tensors.items():
        assert torch.equal(value, expected.tensors[name]), name


PAIR = 3 * 64 * 128 * 2  # a down projection's BF16 inputs of three batches


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("spare", "groups"),
    [(0, [1, 1, 1, 1]), (2 * PAIR, [2]), (4 * PAIR, [])],
    ids=lambda value: str(value),
)
def test_awq_searches_experts_in_groups_that_fit(spare, groups, room, passes, monkeypatch):
    """The inputs of the layer's attention and MLP stay; of the experts only as many as fit."""
    held: list[int] = []
    append = _Cache.append

    def counted(self, values):
        append(self, values)
        held.append(sum(cache.held_bytes for cache in caches))

    caches: list[_Cache] = []
    init = _Cache.__init__
    monkeypatch.setattr(_Cache, "append", counted)
    monkeypatch.setattr(
        _Cache, "__init__", lambda self, *a, **k: caches.append(self) or init(self, *a, **k)
    )
    room(None)
    expected = moe_layer(algorithm="awq")
    everything = max(held)
    caches.clear(), held.clear()
    room(everything - 4 * PAIR + spare)
    assert_equal(moe_layer(algorithm="awq"), expected)
    assert passes == groups
    assert max(held) == everything - 4 * PAIR + max(spare, PAIR)


# --- counted from headers
# ---------------------------------------------------------------------------------------------


def tensors_of_layer(variant: str) -> list[TensorPlan]:
    plan = plan_over(GLM, f"tiny-glm4-moe.{variant}")
    return [tensor for tensor in plan.tensors if tensor.part == "backbone" and tensor.layer == 1]


@pytest.mark.parametrize("routed", [False, True])
def test_hessians_are_as_large_as_counted(routed, monkeypatch):
    largest, first = [0], Hessians._first

    def measured(self, *args):
        found = first(self, *args)
        largest.append(
            sum(own.matrix.nbytes for own in {id(own): own for own in self._sums.values()}.values())
        )
        return found

    monkeypatch.setattr(Hessians, "_first", measured)
    tensors = tensors_of_layer("w4a16-gptq")
    schemes = {tensor.module: tensor.scheme for tensor in tensors if tensor.calibrated == "weights"}
    skeleton = Skeleton(GLM)
    batches = skeleton.enter(1, token_ids(), hidden())
    skeleton.calibrated(batches, schemes, algorithm="gptq", routed=routed)
    assert max(largest) == hessian_bytes(tensors, routed=routed)


def test_awqs_caches_are_as_large_as_counted(monkeypatch):
    """But for the mask and the positions, which attention is handed with its input."""
    caches: list[_Cache] = []
    init = _Cache.__init__
    monkeypatch.setattr(
        _Cache, "__init__", lambda self, *a, **k: caches.append(self) or init(self, *a, **k)
    )
    moe_layer(algorithm="awq")
    counted = awq_cache_bytes(tensors_of_layer("w4a16-awq"), 3 * 64)
    assert 0.8 < counted / sum(cache.whole_bytes for cache in caches) < 1.25
    pairs = counted - awq_cache_bytes(tensors_of_layer("w4a16-awq"), 3 * 64, one_turn=True)
    assert pairs == 3 * PAIR


# --- routed tokens only
# ---------------------------------------------------------------------------------------------


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
    found = moe_layer(scheme, algorithm, unused=3, routed=True)
    suffix = {"FP8": "input_scale", "NVFP4": "input_global_scale"}[scheme]
    largest = max if scheme == "FP8" else min
    for projection in ("gate_proj", "up_proj", "down_proj"):
        scales = [
            float(found.tensors[f"model.layers.1.mlp.experts.{e}.{projection}.{suffix}"])
            for e in range(4)
        ]
        assert scales[3] == largest(scales[:3]) and len({*scales}) > 1


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


# --- several ranks
# --------------------------------------------------------------------------------------------------


def on_rank(rank: int, store: str) -> None:
    """Both see one input in two modules; rank 1 sees a module more."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    modules = [nn.Linear(8, 4) for _ in range(4)]
    a, b, c = torch.randn(3, 2, 5, 8, generator=torch.Generator().manual_seed(0))
    found = hessians_of(modules)
    for number, value in ([(0, a), (1, a)], [(0, b), (1, b), (0, c), (1, c), (2, c)])[rank]:
        found.add(modules[number], value)
    found.sum_over_ranks(modules)
    assert [number for number, module in enumerate(modules) if module in found] == [0, 1, 2]
    for module, values in zip(modules[:3], ([a, b, c], [a, b, c], [c]), strict=True):
        torch.testing.assert_close(found.matrix(module), summed(module, values))
        assert found.samples(module) == 2 * len(values)
    dist.destroy_process_group()


def groups_on_rank(rank: int, store: str) -> None:
    """Rank 0 has two batches and rank 1 one; of rank 0 no token goes to the last expert."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    moe_layer("W4A16", "gptq", unused=3 if rank == 0 else None, share=(rank, 2), routed=True)
    results = []
    for size in (2**40, 1):
        layer.host_room = lambda size=size: size
        results.append(moe_layer("W4A16", "awq", share=(rank, 2)))
    assert_equal(*results)
    dist.destroy_process_group()


class Two(nn.Module):
    """The input of `a` is the same in every channel, so its Hessian cannot be inverted; that of `b`
    can.
    """

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = (
            nn.Linear(32, 32, dtype=torch.bfloat16),
            nn.Linear(32, 32, dtype=torch.bfloat16),
        )

    def forward(self, hidden: Tensor) -> Tensor:
        return self.a(torch.ones_like(hidden)) + self.b(hidden)


def fallen_back_on_rank(rank: int, store: str) -> None:
    """One rank rewrites `a` and the other one `b`; both say what became of `a`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    hidden = torch.randn(1, 64, 32, generator=torch.Generator().manual_seed(rank)).bfloat16()
    schemes, knobs = dict.fromkeys("ab", "W8A8"), {"dampening_frac": 0.0}
    found = calibrate(
        Two(), [{"hidden": hidden}], LayerWork(schemes=schemes, algorithm="gptq", knobs=knobs)
    )
    assert found.rounded == ("a",)
    dist.destroy_process_group()


@pytest.mark.few(1)
@pytest.mark.parametrize("on_rank", [on_rank, groups_on_rank, fallen_back_on_rank])
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
