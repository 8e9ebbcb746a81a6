"""Distinct inputs: each is read once, and every module still gets what its own observer would have
found.
"""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from keepmtp.quantize.calibrate.layers.layer import calibrate
from keepmtp.quantize.calibrate.layers.observed import InputIdentity
from keepmtp.quantize.calibrate.layers.work import LayerWork
from keepmtp.recipes.errors import CheckpointError
from keepmtp.recipes.schemes import SCHEMES
from torch import Tensor, nn


def are_one(one: Tensor, other: Tensor) -> bool:
    return InputIdentity.of(one) == InputIdentity.of(other)


def test_views_of_the_same_elements_are_one_input():
    value = torch.randn(2, 8, 16)
    assert are_one(value, value.view(-1, 16)) and are_one(value, value.detach())
    assert not any(are_one(value, each) for each in (value[:1], value[1:], value.transpose(0, 1)))


def test_a_rewritten_buffer_is_another_input():
    value = torch.randn(8, 16)
    before = InputIdentity.of(value)
    value[3].mul_(2)  # through a view
    assert InputIdentity.of(value) != before and are_one(value, value)


def test_an_address_that_was_given_away_is_another_input():
    seen, addresses = set(), set()
    for turn in range(20):
        value = torch.full((1 << 12,), float(turn))
        addresses.add(value.data_ptr())
        seen.add(InputIdentity.of(value))
        del value
    assert len(addresses) < 20, (
        "the allocator gave an address away twice, or this test shows nothing"
    )
    assert len(seen) == 20


def test_nobody_counts_writes_in_inference_mode():
    with torch.inference_mode():
        value = torch.randn(4)
        assert not are_one(value, value)


class Shared(nn.Module):
    """Four projections of one tensor, which is rewritten in place in front of the third, and one
    that runs twice.
    """

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(name="shared")
        self.a, self.b, self.c, self.d = (
            nn.Linear(64, 64, bias=name == "d").bfloat16() for name in "abcd"
        )

    def forward(self, hidden: Tensor) -> Tensor:
        x = hidden.clone()
        total = self.a(x) + self.b(x.view(-1, 64)).view_as(x)
        x.mul_(3)
        total = total + self.c(x)
        return total + self.d(hidden) + self.d(x * 2)


@pytest.fixture
def shared() -> tuple[Shared, list[dict[str, Tensor]]]:
    torch.manual_seed(0)
    return Shared(), [{"hidden": torch.randn(2, 8, 64).bfloat16() * turn} for turn in (1, 3, 2)]


@pytest.mark.parametrize("scheme", ["NVFP4", "FP8"])
def test_each_module_has_what_its_own_observer_finds(scheme, shared, monkeypatch):
    from compressed_tensors.quantization import QuantizationArgs
    from llmcompressor.observers import Observer

    model, batches = shared
    arguments = QuantizationArgs(**SCHEMES[scheme].config_group()["input_activations"])
    expected: dict = {}

    def observing(observer) -> Callable:
        return lambda _module, inputs: observer(inputs[0]) and None

    for name in "abcd":
        expected[name] = Observer.load_from_registry(
            "static_minmax", base_name="input", args=arguments
        )
    handles = [
        getattr(model, name).register_forward_pre_hook(observing(each))
        for name, each in expected.items()
    ]
    with torch.no_grad():
        for batch in batches:
            model(**batch)
    for handle in handles:
        handle.remove()
    reads, aminmax = [], torch.aminmax
    monkeypatch.setattr(
        torch, "aminmax", lambda value: (reads.append(value.shape), aminmax(value))[1]
    )
    found = calibrate(
        model, batches, LayerWork(schemes=dict.fromkeys("abcd", scheme), algorithm="minmax")
    ).tensors
    assert len(reads) == 3 * 4, "a and b share an input; c's was rewritten; d has two"
    suffix = SCHEMES[scheme].extra[0].suffix
    for name, observer in expected.items():
        qparams = observer.get_qparams()
        value = qparams["global_scale"] if suffix == "input_global_scale" else qparams["scale"]
        assert torch.equal(
            found[f"{name}.{suffix}"].double(),
            value.reshape(found[f"{name}.{suffix}"].shape).double(),
        )


def test_static_scales_observe_the_extremes():
    """What `Observed.set_input_scales` relies on."""
    inputs = [scheme.config_group().get("input_activations") for scheme in SCHEMES.values()]
    static = [each for each in inputs if each and each.get("dynamic") is not True]
    assert static and {each["observer"] for each in static} == {"static_minmax"}


@pytest.mark.parametrize(("module", "side"), [("c", "output"), ("d", "output")])
def test_overflow_in_a_later_batch_is_named(module, side, shared):
    model, batches = shared
    getattr(model, module).weight.data.fill_(3e36)
    small = [
        {"hidden": torch.full_like(batches[0]["hidden"], 1e-3)},
        {"hidden": torch.full_like(batches[0]["hidden"], 1)},
    ]
    with pytest.raises(
        CheckpointError, match=rf"^{module}: activations must be finite.* its {side}, batch 2"
    ):
        calibrate(
            model,
            small,
            LayerWork(schemes=dict.fromkeys("abcd", "FP8_DYNAMIC"), algorithm="minmax"),
        )
