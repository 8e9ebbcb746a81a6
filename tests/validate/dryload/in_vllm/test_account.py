"""The account of a weight load, on modules of our own: every way in which a load can be less than
whole.

What loaders do is spelled out with plain torch on the meta device; no vLLM is needed.
"""

import pytest
import torch
from keepmtp.validate.dryload.in_vllm.account import Account, Construction
from keepmtp.validate.dryload.in_vllm.demands import Demands
from torch.nn import Parameter

BF16 = torch.bfloat16
F32 = torch.float32
FP8 = torch.float8_e4m3fn


class Model(torch.nn.Module):
    """A fused weight [6, 4], a scale born filled, a sink that is padded, packed weights, and a
    weight whose last rows construction fills.
    """

    def __init__(self):
        super().__init__()
        self.weight = Parameter(torch.empty(6, 4, dtype=BF16))
        self.scale = Parameter(torch.full((6, 1), torch.finfo(F32).min))
        self.sink = Parameter(torch.full((8,), -torch.inf))
        self.packed = Parameter(torch.empty(4, 4, dtype=FP8), requires_grad=False)
        self.wide = Parameter(torch.empty(6, 4, dtype=BF16))
        self.wide.data[-2:].zero_()


def built() -> tuple[Model, Account]:
    with torch.device("meta"), (construction := Construction()):
        model = Model()
    return model, Account(model, construction, Demands(may_pad=frozenset({"sink"})))


def loaded(load, **tensors: torch.Tensor) -> tuple[Account, dict[str, tuple[str, int]]]:
    """What the account says after `load(model, tensors)`; status and elements by parameter."""
    model, account = built()
    with account:
        load(model, dict(account.hand_over(tensors.items())))
    account.settle(model)
    return account, {each.name: (each.status, each.num_written) for each in account.params.values()}


def meta(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    "parts, wanted",
    [
        ([["weight", 0, 4], ["weight", 4, 1], ["weight", 5, 1]], ["full", 24]),
        ([["weight", 0, 4]], ["partial", 16]),
        ([["weight", 0, 4], ["weight", 2, 2]], ["partial", 16]),
        ([["scale", 0, 4]], ["partial", 4]),
        ([["sink", 0, 4]], ["padded", 4]),
        ([["wide", 0, 4]], ["full", 24]),
    ],
)
def test_what_was_written_is_counted_by_place(parts, wanted):
    """A parameter that nobody wrote is empty, also where it was born with a value."""

    def load(model, tensors):
        for (param, row, count), tensor in zip(parts, tensors.values(), strict=True):
            getattr(model, param).data[row : row + count].copy_(tensor)

    columns = {"weight": (4,), "wide": (4,), "scale": (1,), "sink": ()}
    given = {f"{row}": meta(count, *columns[param]) for param, row, count in parts}
    account, found = loaded(load, **given)
    written = parts[0][0]
    assert found.pop(written) == tuple(wanted)
    assert {status for name, (status, _) in found.items() if name != "wide"} == {"empty"}
    assert all(tensor.num_read == tensor.num_elements for tensor in account.tensors.values())
    (sources,) = (each.sources for each in account.params.values() if each.name == written)
    assert sources == {name: tensor.numel() for name, tensor in given.items()}


def dequantized(model, tensors):
    """Weight times scale, concatenated, cast."""
    whole = torch.cat([tensors["a"].float() * tensors["s"], tensors["b"].float()])
    model.weight.data.copy_(whole.to(BF16))


def replaced(model, tensors):
    model.weight = Parameter(tensors["a"].t().contiguous(), requires_grad=False)


@pytest.mark.parametrize(
    "load, given, read, wanted",
    [
        (lambda m, t: m.weight.data.copy_(t["a"].narrow(1, 0, 4)), {"a": (6, 8)}, [24], "full"),
        (lambda m, t: t["a"].view(-1)[:4].sum(), {"a": (6, 4)}, [0], "empty"),
        (dequantized, {"a": (4, 4), "s": (), "b": (2, 4)}, [16, 1, 8], "full"),
        (replaced, {"a": (4, 6)}, [24], "full"),
    ],
    ids=["used in part", "used by nobody", "computed", "replaced after the load"],
)
def test_what_was_read_is_counted(load, given, read, wanted):
    account, found = loaded(load, **{name: meta(*shape) for name, shape in given.items()})
    assert [tensor.num_read for tensor in account.tensors.values()] == read
    assert found["weight"][0] == wanted
    sources = next(each.sources for each in account.params.values())
    assert set(sources) == (set(given) if wanted == "full" else set())


@pytest.mark.parametrize(
    "dtype, name, shape, told",
    [
        ("float32", "weight", [6, 4], []),
        ("bfloat16", "packed", [4, 4], ["bfloat16", "float8_e4m3fn"]),
        ("uint8", "packed", [4, 4], ["uint8", "float8_e4m3fn"]),
        ("float8_e4m3fn", "weight", [6, 4], ["float8_e4m3fn", "bfloat16"]),
        ("float8_e8m0fnu", "scale", [6, 1], []),
        ("int64", "weight", [6, 4], []),
        ("float32", "scale", [], ["()", "(6, 1)"]),
    ],
)
def test_casts_that_change_the_numbers_and_values_that_are_spread_are_told(
    dtype, name, shape, told
):
    account, _ = loaded(
        lambda m, t: getattr(m, name).data.copy_(t["t"]),
        t=meta(*shape, dtype=getattr(torch, dtype)),
    )
    assert list(account.misfits) == [(name, "t", *told)] * bool(told)


def test_shapes_that_do_not_fit_are_refused_as_on_a_gpu():
    says = r"output with shape \[6, 4\] doesn't match the broadcast shape of \[4, 6\]"
    with pytest.raises(RuntimeError, match=says):
        loaded(lambda model, tensors: model.weight.data.copy_(tensors["w"]), w=meta(4, 6))


def test_the_tensor_in_hand_is_known():
    _, account = built()
    seen = [account.current for _ in account.hand_over([("a", meta(1)), ("b", meta(1))])]
    assert seen == ["a", "b"] and account.current == ""
