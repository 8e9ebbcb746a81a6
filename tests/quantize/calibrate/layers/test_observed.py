"""Distinct inputs: each is read once, and every module still gets what its own observer would have
found.
"""

from types import SimpleNamespace

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from keepmtp.quantize.calibrate.layers.layer import calibrate
from keepmtp.quantize.calibrate.layers.observed import input_identity
from keepmtp.quantize.calibrate.layers.work import LayerWork
from keepmtp.quantize.calibrate.model.hooks import hooked
from keepmtp.recipes.schemes import SCHEMES
from llmcompressor.observers import Observer
from passes import calls_of
from torch import Tensor, nn


def are_one(one: Tensor, other: Tensor) -> bool:
    return input_identity(one) == input_identity(other)


def test_views_of_the_same_elements_are_one_input():
    value = torch.randn(2, 8, 16)
    assert are_one(value, value.view(-1, 16)) and are_one(value, value.detach())
    assert not any(are_one(value, each) for each in (value[:1], value[1:], value.transpose(0, 1)))
    before = input_identity(value)
    value[0, 3].mul_(2)  # through a view
    assert input_identity(value) != before and are_one(value, value)


def test_an_address_that_was_given_away_is_another_input():
    seen = set()
    addresses = set()
    for turn in range(20):
        value = torch.full((1 << 12,), float(turn))
        addresses.add(value.data_ptr())
        seen.add(input_identity(value))
        del value
    assert len(addresses) < 20, "the allocator gave none away twice: this test shows nothing"
    assert len(seen) == 20


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
    model, batches = shared
    args = QuantizationArgs(**SCHEMES[scheme].config_group()["input_activations"])
    expected: dict = {}
    for name in "abcd":
        expected[name] = Observer.load_from_registry("static_minmax", base_name="input", args=args)
    hooks = []
    for name, observer in expected.items():

        def observe(_module, inputs, own=observer) -> None:
            own(inputs[0])

        hooks.append(model.get_submodule(name).register_forward_pre_hook(observe))
    with torch.no_grad(), hooked(hooks):
        for batch in batches:
            model(**batch)
    reads = calls_of(monkeypatch, torch, "aminmax")
    work = LayerWork(schemes=dict.fromkeys("abcd", scheme), algorithm="minmax")
    found = calibrate(model, batches, work).tensors
    assert len(reads) == 3 * 4, "a and b share an input; c's was rewritten; d has two"
    suffix = SCHEMES[scheme].extra[0].suffix
    for name, observer in expected.items():
        value = observer.get_qparams()[suffix.removeprefix("input_")].double()
        own = found[f"{name}.{suffix}"].double()
        assert torch.equal(own, value.reshape(own.shape))


def test_static_scales_observe_the_extremes():
    """What `Observed.set_input_scales` relies on."""
    inputs = [scheme.config_group().get("input_activations") for scheme in SCHEMES.values()]
    static = [each for each in inputs if each and each.get("dynamic") is not True]
    assert static and {each["observer"] for each in static} == {"static_minmax"}
