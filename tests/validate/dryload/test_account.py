"""The account of a weight load, on modules of our own: every way in which a load can be less than
whole.

What loaders do is spelled out with plain torch on the meta device; no vLLM is needed.
"""

import random

import pytest
import torch
from keepmtp.validate.dryload.in_vllm.account import Account, Construction, Written
from keepmtp.validate.dryload.in_vllm.demands import Demands
from keepmtp.validate.dryload.in_vllm.experts import Mapping

META = torch.device("meta")


class Model(torch.nn.Module):
    """A fused weight [6, 4], a scale born filled, a sink that is padded, packed weights."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(6, 4, dtype=torch.bfloat16))
        self.scale = torch.nn.Parameter(torch.full((6, 1), torch.finfo(torch.float32).min))
        self.sink = torch.nn.Parameter(torch.full((8,), -torch.inf))
        self.packed = torch.nn.Parameter(
            torch.empty(4, 4, dtype=torch.float8_e4m3fn), requires_grad=False
        )


def loaded(load, tensors: dict[str, torch.Tensor], **demands) -> tuple[Account, dict[str, Written]]:
    """What the account says after `load(model, tensors)`."""
    model, account = built(**demands)
    with account:
        load(model, dict(account.hand_over(tensors.items())))
    account.settle(model)
    return account, {param.name: param for param in account.params}


def built(padded_rows: int = 0, **demands) -> tuple[Model, Account]:
    construction = Construction()
    with META, construction:
        model = Model()
        if padded_rows:
            model.weight.data[-padded_rows:].zero_()
    return model, Account(model, construction, Demands(**demands))


def bf16(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16, device="meta")


def test_what_nobody_wrote_is_empty_also_where_it_was_born_with_a_value():
    _, params = loaded(lambda model, tensors: None, {})
    assert {param.status for param in params.values()} == {"empty"}


def test_all_shards_make_a_fused_parameter_full():
    def load(model, tensors):
        for row, name in ((0, "q"), (4, "k"), (5, "v")):
            part = tensors[name]
            model.weight.data[row : row + part.shape[0]].copy_(part)

    account, params = loaded(load, {"q": bf16(4, 4), "k": bf16(1, 4), "v": bf16(1, 4)})
    assert params["weight"].status == "full" and params["weight"].sources == {
        "q": 16,
        "k": 4,
        "v": 4,
    }
    assert all(tensor.num_read == tensor.num_elements for tensor in account.tensors.values())


def test_a_lost_shard_leaves_it_partial_and_a_scale_is_never_padding():
    def load(model, tensors):
        model.weight.data[:4].copy_(tensors["q"])
        model.scale.data[:4].copy_(tensors["q.scale"])
        model.sink.data[:4].copy_(tensors["sink"])

    tensors = {
        "q": bf16(4, 4),
        "q.scale": torch.empty(4, 1, device="meta"),
        "sink": torch.empty(4, device="meta"),
    }
    _, params = loaded(load, tensors, may_pad=frozenset({"sink"}))
    assert (params["weight"].status, params["weight"].num_written) == ("partial", 16)
    assert params["scale"].status == "partial"
    assert params["sink"].status == "padded"


def test_rows_that_construction_fills_by_themselves_are_padding():
    model, account = built(padded_rows=2)
    with account:
        for _, tensor in account.hand_over([("w", bf16(4, 4))]):
            model.weight.data[:4].copy_(tensor)
    assert next(param for param in account.params if param.name == "weight").status == "full"


def test_the_same_place_written_twice_counts_once():
    """Two shards in one place leave another empty, although as many elements were copied as there
    are.
    """

    def load(model, tensors):
        model.weight.data[:4].copy_(tensors["a"])
        model.weight.data[2:4].copy_(tensors["b"])

    _, params = loaded(load, {"a": bf16(4, 4), "b": bf16(2, 4)})
    assert (params["weight"].status, params["weight"].num_written) == ("partial", 16)


def test_a_tensor_used_in_part_is_told():
    account, params = loaded(
        lambda model, tensors: model.weight.data.copy_(tensors["wide"].narrow(1, 0, 4)),
        {"wide": bf16(6, 8)},
    )
    assert params["weight"].status == "full"
    assert (account.tensors["wide"].num_read, account.tensors["wide"].num_elements) == (24, 48)


def test_a_tensor_that_nobody_uses_is_told():
    account, _ = loaded(
        lambda model, tensors: tensors["lost"].view(-1)[:4].sum(), {"lost": bf16(6, 4)}
    )
    assert account.tensors["lost"].num_read == 0


def test_computed_values_inherit_their_sources():
    """Dequantized on load: weight times scale, concatenated, cast."""

    def load(model, tensors):
        whole = torch.cat([tensors["a"].float() * tensors["s"], tensors["b"].float()])
        model.weight.data.copy_(whole.to(torch.bfloat16))

    tensors = {"a": bf16(4, 4), "s": torch.empty((), device="meta"), "b": bf16(2, 4)}
    account, params = loaded(load, tensors)
    assert params["weight"].status == "full" and set(params["weight"].sources) == {"a", "s", "b"}
    assert all(tensor.num_read for tensor in account.tensors.values())


def test_a_parameter_replaced_after_the_load_is_full():
    def load(model, tensors):
        model.weight = torch.nn.Parameter(tensors["w"].t().contiguous(), requires_grad=False)

    _, params = loaded(load, {"w": bf16(4, 6)})
    assert params["weight"].status == "full"


@pytest.mark.parametrize(
    ("dtype", "param", "is_told"),
    [
        (torch.float32, "weight", False),
        (torch.bfloat16, "packed", True),
        (torch.uint8, "packed", True),  # FP8 stored as bytes: copy_ turns 0x38 into 56.0
        (torch.float8_e4m3fn, "weight", True),
        (torch.float8_e8m0fnu, "scale", False),  # a power of two is exact in float32
        (torch.int64, "weight", False),
    ],
)
def test_casts_that_change_the_numbers_are_told(dtype, param, is_told):
    def load(model, tensors):
        getattr(model, param).data.copy_(tensors["t"])

    shape = {"weight": (6, 4), "packed": (4, 4), "scale": (6, 1)}[param]
    account, _ = loaded(load, {"t": torch.empty(shape, dtype=dtype, device="meta")})
    assert bool(account.misfits) == is_told
    assert all(note[:2] == (param, "t") for note in account.misfits)


def test_a_value_spread_over_many_is_told():
    account, _ = loaded(
        lambda model, tensors: model.scale.data.copy_(tensors["s"]),
        {"s": torch.empty((), device="meta")},
    )
    assert list(account.misfits) == [("scale", "s", "()", "(6, 1)")]


def test_shapes_that_do_not_fit_are_refused_as_on_a_gpu():
    with pytest.raises(
        RuntimeError,
        match=r"output with shape \[6, 4\] doesn't match the broadcast shape of \[4, 6\]",
    ):
        loaded(lambda model, tensors: model.weight.data.copy_(tensors["w"]), {"w": bf16(4, 6)})


def test_the_tensor_in_hand_is_known():
    _, account = built()
    seen = [account.current for _ in account.hand_over([("a", bf16(1)), ("b", bf16(1))])]
    assert seen == ["a", "b"] and account.current == ""


def test_fewer_expert_mappings_are_searched_and_the_same_ones_found():
    """Against the whole list, for names with and without an expert's number."""
    entries = [
        (f"experts.w{'2' if shard == 'w2' else '13'}_", f"experts.{expert}.{shard}.", expert, shard)
        for expert in range(40)
        for shard in ("w1", "w2", "w3")
    ]
    names = [
        f"layers.{random.Random(0).randrange(9)}.ffn.experts.{e}.{s}.weight"
        for e in (0, 1, 11, 39, 40)
        for s in ("w1", "w2", "w3", "w4")
    ]
    current = [""]
    mapping = Mapping(entries, lambda: current[0])
    assert list(mapping) == entries
    for name in [*names, "layers.0.attn.wq_a.weight", "mtp.0.ffn.shared_experts.w1.weight"]:
        current[0] = name
        assert [entry for entry in mapping if entry[1] in name] == [
            entry for entry in entries if entry[1] in name
        ]
    current[0] = names[0]
    assert len(list(mapping)) == 3
