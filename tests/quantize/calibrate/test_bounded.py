"""What GPTQ and AWQ keep of a layer is bounded: one Hessian for each input, and experts in groups; bit for bit."""

from collections.abc import Callable
from functools import cache
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from keepmtp.quantize.calibrate.layers import hessians
from keepmtp.quantize.calibrate.layers.awq import _Cache
from keepmtp.quantize.calibrate.layers.expert_passes import ExpertPasses, StatisticsRoom
from keepmtp.quantize.calibrate.layers.hessians import Hessians
from keepmtp.quantize.calibrate.layers.layer import Calibrated, calibrate
from keepmtp.quantize.calibrate.layers.work import LayerWork
from keepmtp.quantize.needs.memory import awq_cache_bytes, hessian_bytes
from keepmtp.quantize.plan.tensor_plan import TensorPlan
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
    return calibrate(
        skeleton.model,
        batches,
        LayerWork(schemes=dict.fromkeys(skeleton.linears(1), scheme), algorithm=algorithm, **options),
    )


def summed(module: nn.Module, values: list[Tensor]) -> "hessians._Sum":
    own = hessians._Sum(make_empty_hessian(module), {module})
    for value in values:
        own.add(value)
    return own


@cache
def unbounded(scheme: str = "W4A16", algorithm: str = "gptq", *, unused: int | None = None, **options) -> Calibrated:
    """The same where everything fits, as it does here; with a `room` it is to be asked for before."""
    return moe_layer(scheme, algorithm, unused=unused, **options)


@pytest.fixture
def most(monkeypatch) -> list[int]:
    """Matrices in memory after each call of a module."""
    counts: list[int] = []
    add = Hessians.add

    def counted(self, module, value):
        add(self, module, value)
        counts.append(self.num_matrices)

    monkeypatch.setattr(Hessians, "add", counted)
    return counts


@pytest.mark.parametrize("scheme", ["W4A16", "NVFP4"])
def test_a_moe_layer_needs_a_hessian_for_each_input(scheme, most, monkeypatch):
    """q, k, v share one, all gate and up projections share one; o and each of five down projections have their own."""
    factored: list[int] = []
    factorize = hessians.factorize_hessian
    monkeypatch.setattr(hessians, "factorize_hessian", lambda *a: factored.append(len(a[1])) or factorize(*a))
    shared = moe_layer(scheme)
    assert max(most) == 8
    # The shared expert reads sequences and the routed ones rows: one sum, divided by two numbers of samples.
    assert factored == [1] * 9
    most.clear()
    with monkeypatch.context() as patch:
        patch.setattr(Hessians, "_first", lambda _self, module, _identity, value: summed(module, [value]))
        apart = moe_layer(scheme)
    assert max(most) == 4 + 3 * 5
    assert len(factored) == 9 + 19
    assert shared.tensors.keys() == apart.tensors.keys()
    for name, value in shared.tensors.items():
        assert torch.equal(value, apart.tensors[name]), name


def test_sums_part_where_inputs_do():
    """Modules that read the same tensor once and others later; one that is called twice, and one not at all."""
    first, second, third = (nn.Linear(8, 4) for _ in range(3))
    generator = torch.Generator().manual_seed(0)
    a, b, c, d = (torch.randn(2, 5, 8, generator=generator) for _ in range(4))
    found = Hessians()
    calls = [(first, a), (second, a), (third, a), (first, b), (second, c), (third, b), (first, d), (first, a)]
    for module, value in calls:
        found.add(module, value)
    found.settle()
    for module in (first, second, third):
        values = [value for each, value in calls if each is module]
        assert torch.equal(found.matrix(module), summed(module, values).matrix)
        assert found.samples(module) == 2 * len(values)
    assert found.num_matrices == 3


def test_sums_stay_together_while_inputs_do():
    modules = [nn.Linear(8, 4) for _ in range(3)]
    found = Hessians()
    for value in torch.randn(4, 2, 5, 8):
        for module in modules:
            found.add(module, value)
        found.add(modules[0], value.flip(0))
    found.settle()
    assert found.num_matrices == 2
    assert found.matrix(modules[1]) is found.matrix(modules[2])


def test_memory_that_is_used_again_is_another_input():
    """What the allocator does with the inputs of experts' down projections, and what an operation in place does."""
    modules = [nn.Linear(64, 4) for _ in range(4)]
    found, expected = Hessians(), []
    for index, module in enumerate(modules[:3]):
        value = torch.full((5, 64), float(index + 1))
        found.add(module, value)
        expected.append(summed(module, [value]).matrix)
        if index == 2:
            value.mul_(2)
            found.add(modules[3], value)
            expected.append(summed(module, [value]).matrix)
        del value
    for module, matrix in zip(modules, expected, strict=True):
        assert torch.equal(found.matrix(module), matrix)
    assert found.num_matrices == 4


def test_rows_are_the_same_input_whatever_their_batches_are():
    """As a shared expert reads sequences where the routed ones read rows; the library counts the former as several."""
    routed, shared, other = (nn.Linear(8, 4) for _ in range(3))
    value, found = torch.randn(3, 5, 8), Hessians()
    for module, read in ((routed, value.view(-1, 8)), (shared, value), (other, value.transpose(0, 1))):
        found.add(module, read)
    assert found.matrix(routed) is found.matrix(shared) and found.num_matrices == 2
    assert (found.samples(routed), found.samples(shared), found.samples(other)) == (1, 3, 5)
    for module, read in ((routed, value.view(-1, 8)), (shared, value), (other, value.transpose(0, 1))):
        library, _ = accumulate_hessian(read, module, make_empty_hessian(module), torch.zeros(()))
        assert torch.equal(found.matrix(module), library)


# --- experts in groups ------------------------------------------------------------------------------------------------


@pytest.fixture
def room(monkeypatch) -> Callable[[int | None], None]:
    """Sets what statistics may take, in bytes."""
    return lambda size: monkeypatch.setattr(
        StatisticsRoom, "of", lambda _device: StatisticsRoom(device=size, host=size)
    )


@pytest.fixture
def passes(monkeypatch) -> list[int]:
    """How many experts each further pass is for."""
    counts: list[int] = []
    run = ExpertPasses.run
    monkeypatch.setattr(
        ExpertPasses, "run", lambda self, chosen, **options: counts.append(len(chosen)) or run(self, chosen, **options)
    )
    return counts


def assert_equal(found: Calibrated, expected: Calibrated) -> None:
    assert found.tensors.keys() == expected.tensors.keys()
    for name, value in found.tensors.items():
        assert torch.equal(value, expected.tensors[name]), name


@pytest.mark.parametrize(
    ("size", "groups", "matrices"),
    [
        # Of 256 x 256 for attention and the experts' input, and 128 x 128 for each down projection.
        pytest.param(1, [4, 3, 2, 1], 4 + 1, id="one expert at a time"),
        pytest.param(3 * 2**18 + 2 * 2**16, [2, 1], 4 + 2, id="two at a time"),
        pytest.param(None, [], 8, id="all at once"),
    ],
)
def test_gptq_takes_experts_in_groups_that_fit(size, groups, matrices, room, passes, most):
    expected = unbounded()
    most.clear()
    room(size)
    found = moe_layer()
    assert_equal(found, expected)
    assert passes == groups and max(most) == matrices


@pytest.mark.full
def test_two_layers_of_experts_at_once(room, passes):
    """As in an MTP block of two layers: the second reads what the first one computed."""
    results = []
    for size in (None, 1):
        room(size)
        skeleton = Skeleton(GLM)
        skeleton.enter(2, [], None)
        batches = skeleton.enter(1, token_ids(), hidden())
        schemes = dict.fromkeys(skeleton.linears(1) + skeleton.linears(2), "W4A16")
        results.append(calibrate(skeleton.model, batches, LayerWork(schemes=schemes, algorithm="gptq")))
    assert_equal(results[1], results[0])
    assert passes == [*range(8, 3, -1), *range(4, 0, -1)]


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
    monkeypatch.setattr(_Cache, "__init__", lambda self, *a, **k: caches.append(self) or init(self, *a, **k))
    room(None)
    expected = moe_layer(algorithm="awq")
    everything = max(held)
    caches.clear(), held.clear()
    room(everything - 4 * PAIR + spare)
    assert_equal(moe_layer(algorithm="awq"), expected)
    assert passes == groups
    assert max(held) == everything - 4 * PAIR + max(spare, PAIR)


# --- counted from headers ---------------------------------------------------------------------------------------------


def tensors_of_layer(variant: str) -> list[TensorPlan]:
    plan = plan_over(GLM, f"tiny-glm4-moe.{variant}")
    return [tensor for tensor in plan.tensors if tensor.part == "backbone" and tensor.layer == 1]


@pytest.mark.parametrize("routed", [False, True])
def test_hessians_are_as_large_as_counted(routed, monkeypatch):
    largest, first = [0], Hessians._first

    def measured(self, *args):
        found = first(self, *args)
        largest.append(self._num_bytes)
        return found

    monkeypatch.setattr(Hessians, "_first", measured)
    tensors = tensors_of_layer("w4a16-gptq")
    schemes = {tensor.module: tensor.scheme for tensor in tensors if tensor.calibrated == "weights"}
    skeleton = Skeleton(GLM)
    batches = skeleton.enter(1, token_ids(), hidden())
    calibrate(skeleton.model, batches, LayerWork(schemes=schemes, algorithm="gptq", routed=routed))
    assert max(largest) == hessian_bytes(tensors, routed=routed)
    of_one = 4 * 256**2 if routed else 4 * 128**2
    expected = hessian_bytes(tensors, routed=routed) - (4 if routed else 3) * 4 * 128**2 - (3 if routed else 0) * of_one
    assert hessian_bytes(tensors, routed=routed, one_turn=True) == expected


def test_awqs_caches_are_as_large_as_counted(monkeypatch):
    """But for the mask and the positions, which attention is handed with its input."""
    caches: list[_Cache] = []
    init = _Cache.__init__
    monkeypatch.setattr(_Cache, "__init__", lambda self, *a, **k: caches.append(self) or init(self, *a, **k))
    moe_layer(algorithm="awq")
    counted = awq_cache_bytes(tensors_of_layer("w4a16-awq"), 3 * 64)
    assert 0.8 < counted / sum(cache.whole_bytes for cache in caches) < 1.25
    pairs = counted - awq_cache_bytes(tensors_of_layer("w4a16-awq"), 3 * 64, one_turn=True)
    assert pairs == 3 * PAIR


# --- routed tokens only ---------------------------------------------------------------------------------------------


@pytest.mark.full
def test_routed_experts_are_calibrated_as_llmcompressor_does_without_all_experts():
    ids = token_ids()
    model = sequential(GLM, ids, [GPTQModifier(targets="Linear", scheme="W4A16", ignore=IGNORE)], all_experts=False)
    _, results = layerwise(GLM, ids, "W4A16", "gptq", routed=True)
    assert assert_same(results, model, all_tensors=True) > 10
    _, everything = layerwise(GLM, ids, "W4A16", "gptq")
    name = "model.layers.1.mlp.experts.0.up_proj.weight_packed"
    assert not torch.equal(results[1].tensors[name], everything[1].tensors[name])


@pytest.mark.few(1)
@pytest.mark.parametrize("size", [None, 1], ids=["all at once", "one at a time"])
def test_an_expert_without_a_token_takes_all_of_them(size, room, passes):
    """Its tensors are those of `all`, to the bit, and the other experts' those of their own tokens."""
    everything, own, expected = unbounded(unused=3), unbounded(routed=True), unbounded(unused=3, routed=True)
    passes.clear()
    room(size)
    found = moe_layer(unused=3, routed=True)
    routed = {entry.module: entry.routed for entry in found.coverage}
    tokens = {entry.module: entry.tokens for entry in found.coverage}
    for projection in ("gate_proj", "up_proj", "down_proj"):
        name = f"model.layers.1.mlp.experts.3.{projection}"
        assert routed[name] == tokens[name] == 0
        for suffix in ("weight_packed", "weight_scale"):
            assert torch.equal(found.tensors[f"{name}.{suffix}"], everything.tensors[f"{name}.{suffix}"])
        assert not torch.equal(found.tensors[f"{name}.weight_packed"], own.tensors[f"{name}.weight_packed"])
        other = f"model.layers.1.mlp.experts.0.{projection}.weight_packed"
        assert not torch.equal(found.tensors[other], everything.tensors[other])
    assert_equal(found, expected)
    assert passes[-1] == 1


@pytest.mark.parametrize(("algorithm", "scheme"), [("minmax", "FP8"), ("gptq", "NVFP4")])
def test_a_scale_that_no_token_decides_is_the_other_experts(algorithm, scheme):
    found = moe_layer(scheme, algorithm, unused=3, routed=True)
    suffix = {"FP8": "input_scale", "NVFP4": "input_global_scale"}[scheme]
    largest = max if scheme == "FP8" else min
    for projection in ("gate_proj", "up_proj", "down_proj"):
        scales = [float(found.tensors[f"model.layers.1.mlp.experts.{e}.{projection}.{suffix}"]) for e in range(4)]
        assert scales[3] == largest(scales[:3]) and len({*scales}) > 1


def test_experts_with_few_tokens_are_named():
    found = moe_layer("FP8", "minmax", routed=True)
    entries = {entry.module: entry for entry in found.coverage}
    gate, down = (entries[f"model.layers.1.mlp.experts.0.{projection}"] for projection in ("gate_proj", "down_proj"))
    assert gate.has_few_tokens == (gate.routed < 256) and down.has_few_tokens == (down.routed < 128)
    assert gate.tokens == gate.routed and gate.has_few_tokens
    assert not entries["model.layers.1.mlp.shared_experts.up_proj"].has_few_tokens
    assert not any(entry.has_few_tokens for entry in moe_layer("FP8", "minmax").coverage)


# --- several ranks ----------------------------------------------------------------------------------------------------

NAMES = ("first", "second", "third", "never")


def on_rank(rank: int, store: str) -> None:
    """Rank 0 sees one input in two modules; rank 1 sees two, and a module more."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    modules = {name: nn.Linear(8, 4) for name in NAMES}
    a, b, c = torch.randn(3, 2, 5, 8, generator=torch.Generator().manual_seed(0))
    calls = [{"first": [a], "second": [a]}, {"first": [b], "second": [b, c], "third": [c]}]
    found = Hessians()
    for name, values in calls[rank].items():
        for value in values:
            found.add(modules[name], value)
    found.settle()
    assert found.num_matrices == (1, 3)[rank]
    found.sum_over_ranks({module: name for name, module in modules.items()})
    assert [name for name, module in modules.items() if module in found] == ["first", "second", "third"]
    for name, values in (("first", [a, b]), ("second", [a, b, c]), ("third", [c])):
        expected = summed(modules[name], values).matrix
        torch.testing.assert_close(found.matrix(modules[name]), expected)
        assert found.samples(modules[name]) == 2 * len(values)
    dist.destroy_process_group()


def groups_on_rank(rank: int, store: str) -> None:
    """Rank 0 has one batch and rank 1 two; in none of the first is a token for the last expert."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    for algorithm, routed in (("gptq", False), ("gptq", True), ("awq", False)):
        results = []
        for size in (None, 1):
            StatisticsRoom.of = classmethod(lambda _cls, _device, size=size: StatisticsRoom(device=size, host=size))
            unused = 3 if rank == 0 and routed else None
            results.append(moe_layer("W4A16", algorithm, unused=unused, share=(rank, 2), routed=routed))
        assert_equal(*results)
    dist.destroy_process_group()


class Two(nn.Module):
    """The input of `a` is the same in every channel, so its Hessian cannot be inverted; that of `b` can."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(32, 32, dtype=torch.bfloat16), nn.Linear(32, 32, dtype=torch.bfloat16)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.a(torch.ones_like(hidden)) + self.b(hidden)


def fallen_back_on_rank(rank: int, store: str) -> None:
    """One rank rewrites `a` and the other one `b`; both say what became of `a`."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    hidden = torch.randn(1, 64, 32, generator=torch.Generator().manual_seed(rank)).bfloat16()
    schemes, knobs = dict.fromkeys("ab", "W8A8"), {"dampening_frac": 0.0}
    found = calibrate(Two(), [{"hidden": hidden}], LayerWork(schemes=schemes, algorithm="gptq", knobs=knobs))
    assert found.rounded == ("a",)
    dist.destroy_process_group()


@pytest.mark.few(1)
@pytest.mark.parametrize("on_rank", [on_rank, groups_on_rank, fallen_back_on_rank])
def test_ranks_agree(on_rank, tmp_path):
    processes = [get_context("fork").Process(target=on_rank, args=(rank, str(tmp_path / "store"))) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        process.kill()
    assert [process.exitcode for process in processes] == [0, 0]
