"""AutoRound on one layer at a time, against llm-compressor's own sequential pipeline; and its
gates.

Equality is to the bit, where llm-compressor's pipeline tunes each layer on what that layer is
really handed. As it is, it tunes a layer on outputs that auto-round computed of the layer before,
in batches of its own, which nobody keeps.
"""

import gc

import pytest
import torch
from keepmtp.quantize.calibrate.layers import autoround
from keepmtp.recipes.errors import CheckpointError
from keepmtp.recipes.schemes import SCHEMES
from layerwise import (
    GLM,
    IGNORE,
    QWEN,
    Skeleton,
    assert_same,
    layerwise,
    outliers,
    sequential,
    token_ids,
)
from torch import Tensor

KNOBS = {"iters": 4, "lr": 0.01, "batch_size": 2, "enable_torch_compile": False}


@pytest.fixture(autouse=True, scope="module")
def quick(one_thread):
    """What is there is passed over, since auto-round lets garbage be collected at every turn."""
    gc.freeze()
    yield
    gc.unfreeze()


def one_layer(schemes=None, *, index: int = 1, together: int = 1, **options):
    """A layer's statistics; hidden states with loud channels, `together` sequences in a batch."""
    skeleton = Skeleton(GLM)
    ids, hidden = (
        [torch.cat(each[i : i + together]) for i in range(0, 4, together)]
        for each in (token_ids(), outliers(4, 256))
    )
    batches = skeleton.enter(index, ids, hidden)
    schemes = {
        name: (schemes or {}).get(name.split(".")[3], "W4A16") for name in skeleton.linears(index)
    }
    options = {"algorithm": "autoround", "knobs": KNOBS, **options}
    return skeleton.calibrated(batches, schemes, **options).tensors


def assert_equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


@pytest.mark.few(1)
@pytest.mark.parametrize("folder, scheme", [(GLM, "W4A16"), (QWEN, "W8A16"), (GLM, "W4A16_ASYM")])
def test_autoround_equals_the_sequential_pipelines(folder, scheme):
    from auto_round.utils.device import CpuInfo
    from llmcompressor.modifiers.autoround import AutoRoundModifier

    if not CpuInfo().bf16:
        pytest.skip("AutoRound's own run wants a processor with BF16: it mixes types without")

    class OnWhatTheLayerIsHanded(AutoRoundModifier):
        def on_sequential_epoch_end(self, state, event, modules, **kwargs):
            super().on_sequential_epoch_end(state, event, modules, **kwargs)
            self._q_input = None

    # Linear attention is a loop in PyTorch, and slow to learn through.
    is_quick = folder == GLM and scheme == "W4A16"
    ids, knobs = (
        (token_ids(), KNOBS) if is_quick else (token_ids(2, length=8), KNOBS | {"iters": 2})
    )
    modifier = OnWhatTheLayerIsHanded(targets="Linear", scheme=scheme, ignore=IGNORE, **knobs)
    model = sequential(folder, ids, [modifier])
    _, results = layerwise(folder, ids, scheme, "autoround", knobs=knobs)
    tensors = len(SCHEMES[scheme].tensors(128, 128))
    assert assert_same(results, model, all_tensors=True) == tensors * sum(
        len(result.coverage) for result in results
    )


def test_a_layer_does_not_depend_on_what_ran_before():
    """So a killed run comes out the same. Nor does it on the batches that the states are read
    in.
    """
    expected = one_layer()
    torch.use_deterministic_algorithms(False)  # llm-compressor's own run leaves them on
    torch.manual_seed(5)
    drawn = torch.get_rng_state()
    assert_equal(one_layer(), expected)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert not torch.are_deterministic_algorithms_enabled()
    assert_equal(one_layer(together=2), expected)


@pytest.mark.parametrize("algorithm, knobs", [("autoround", KNOBS), ("gptq", {})])
def test_other_schemes_of_the_layer_are_rounded_to_nearest(algorithm, knobs):
    """Two schemes in one run do not disturb each other."""
    schemes = {"self_attn": "FP8"}
    given = {"algorithm": algorithm, "knobs": knobs}
    mixed = one_layer(schemes, **given)
    plain = one_layer(schemes, algorithm="minmax", knobs={})
    scales = {name: value for name, value in mixed.items() if "self_attn" in name}
    assert_equal(scales, plain)
    assert {name.rpartition(".")[2] for name in scales} == {"input_scale"}
    codes = {name: value for name, value in mixed.items() if ".mlp." in name}
    assert len(codes) == 3 * 15, "every matrix of the MLP has its codes, scales and shape"
    if algorithm == "gptq":
        whole = one_layer(**given)
        assert_equal(codes, {name: whole[name] for name in codes})


def test_a_module_that_is_passed_over_is_named(monkeypatch):
    name = "model.layers.1.mlp.experts.2.up_proj"
    own = autoround.LayerAutoRound.get_unquantized_layer_names
    others = lambda self, layer: [*own(self, layer), "model.layers.0.mlp.experts.2.up_proj"]  # noqa: E731
    monkeypatch.setattr(autoround.LayerAutoRound, "get_unquantized_layer_names", others)
    with pytest.raises(
        CheckpointError,
        match=f"^{name}: AutoRound must tune every module that it is given; got a mod",
    ):
        one_layer()
