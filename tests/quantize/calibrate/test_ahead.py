"""The next layer's weights, read while this one computes: each byte once, the same values, and bounded memory."""

import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from calibrated import planned
from gpu_runs import in_a_child
from keepmtp.checkpoints import values
from keepmtp.checkpoints.safetensors_file import Entry
from keepmtp.checkpoints.source import Source
from keepmtp.quantize.calibrate.layers import ahead as module
from keepmtp.quantize.calibrate.layers.ahead import ReadAhead
from keepmtp.quantize.calibrate.model.skeleton import Skeleton
from keepmtp.quantize.pack import weights
from keepmtp.quantize.plan.plan import Plan
from keepmtp.quantize.run.ranks import Ranks
from keepmtp.quantize.write import writer
from keepmtp.recipes.errors import CheckpointError
from passes import plan_over
from pretended_gpu import pretended_gpu

CPU = torch.device("cpu")
ALONE = Ranks(rank=0, size=1, device=CPU)
# Plain weights, FP8 in blocks, MXFP4, experts in stacks.
MODELS = ("glm-4.7", "deepseek-v3.1", "dsv4-flash", "qwen3.5-397b")


@pytest.fixture(scope="module", params=MODELS)
def plan(request, tmp_path_factory) -> Plan:
    schemes = {"attention": "bf16"} if request.param.startswith(("deepseek", "ds")) else {}
    return planned(tmp_path_factory.mktemp(request.param) / "source", model=request.param, data="random", **schemes)


@pytest.fixture
def num_read(monkeypatch) -> Counter[str]:
    """Bytes that were read of each tensor."""
    found: Counter[str] = Counter()
    real = values.read

    def read(source: Source, entry: Entry, into: memoryview, *, offset: int = 0) -> None:
        found[entry.name] += len(into)
        real(source, entry, into, offset=offset)

    monkeypatch.setattr(values, "read", read)
    return found


def filled(skeleton: Skeleton, index: int, given: ReadAhead | None = None) -> dict[str, torch.Tensor]:
    """The weights of a layer."""
    with skeleton.layer(index, given and given.take()) as layer:
        return {name: value.clone() for name, value in layer.state_dict().items()}


def test_each_byte_is_read_once_and_ahead_are_the_same_weights(plan, num_read):
    skeleton = Skeleton(plan, device=CPU)
    index = len(skeleton) - 1
    stored = {name: plan.entries[name].num_bytes for each in skeleton.tensors_of(index) for name in each.inputs}
    num_read.clear()
    expected = filled(skeleton, index)
    assert num_read == stored, "gate and up of a stack are one tensor"
    with ReadAhead(plan, ALONE) as given:
        num_read.clear()
        given.start(skeleton.tensors_of(index))
        found = filled(skeleton, index, given)
        assert num_read == stored
        assert given.take() == {}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name].view(torch.uint8), value.view(torch.uint8)) for name, value in expected.items())


def test_an_expert_keeps_no_more_memory_than_its_own(tmp_path):
    """Gate and up of a stack are views of what was read for both."""
    plan = planned(tmp_path / "source", model="qwen3.5-397b")
    skeleton = Skeleton(plan, device=CPU)
    with skeleton.layer(0) as layer:
        storages = {value.untyped_storage().data_ptr(): value.untyped_storage() for value in layer.parameters()}
        assert sum(each.nbytes() for each in storages.values()) == sum(value.nbytes for value in layer.parameters())


def test_no_more_is_read_than_there_is_room_for(tmp_path, monkeypatch, num_read):
    plan = planned(tmp_path / "source", data="random")
    skeleton = Skeleton(plan, device=CPU)
    sizes = [plan.entries[name].num_bytes for each in skeleton.tensors_of(1) for name in each.inputs]
    expected = filled(skeleton, 1)
    for room, count in ((0, 0), (sum(sizes[:5]), 5), (sum(sizes), len(sizes))):
        monkeypatch.setattr(module, "free_host_bytes", lambda room=room: int(room / module.SHARE_AHEAD))
        with ReadAhead(plan, ALONE) as given:
            num_read.clear()
            given.start(skeleton.tensors_of(1))
            assert given._coming is not None and len(given._coming.result()) == count
            found = filled(skeleton, 1, given)  # the rest is read now
        assert sum(num_read.values()) == sum(sizes)
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_shard_that_ends_early_is_named_when_its_layer_begins(tmp_path):
    plan = planned(tmp_path / "source")
    skeleton = Skeleton(plan, device=CPU)
    entry = plan.entries[skeleton.tensors_of(1)[0].inputs[0]]
    os.truncate(Path(tmp_path / "source" / entry.file), entry.start + 1)
    with ReadAhead(plan, ALONE) as given:
        given.start(skeleton.tensors_of(1))
        with pytest.raises(CheckpointError, match=rf"{entry.file}: {entry.name} must be whole; got end of file"):
            given.take()


def test_an_end_in_the_middle_waits_for_no_more_than_a_tensor(tmp_path, num_read):
    plan = planned(tmp_path / "source")
    skeleton = Skeleton(plan, device=CPU)
    num_read.clear()
    with pytest.raises(KeyboardInterrupt), ReadAhead(plan, ALONE) as given:
        given._stop.set()  # as its end does, before the thread has begun
        given.start(skeleton.tensors_of(1))
        raise KeyboardInterrupt
    assert not num_read


def test_weights_are_dequantized_on_the_device_that_computes_and_packs(tmp_path):
    """Packed, they are a fraction of the bytes to move, and a GPU dequantizes in no time."""
    in_a_child(dequantizing_run, tmp_path)


def dequantizing_run(folder: Path) -> None:
    planned(folder / "source", model="deepseek-v3.1", data="random", attention="bf16")
    plan = plan_over(folder / "source", "deepseek-v3.1")  # without data, so that it can be packed at once
    forms: Counter[tuple[str, str]] = Counter()
    real = weights.dequantize

    def dequantize(form: str, parts: Mapping[str, torch.Tensor], **words: Any) -> torch.Tensor:
        forms.update((form, value.device.type) for value in parts.values())
        return real(form, parts, **words)

    with pretended_gpu() as gpu, patch.object(weights, "dequantize", dequantize):
        with Skeleton(plan, device=gpu.device).layer(1):
            assert forms["fp8_block", "gpu"] and {device for _, device in forms} == {"gpu"}
        forms.clear()
        (folder / "out").mkdir()
        with patch.object(writer, "_devices", lambda: [gpu.device]):
            writer.write_shards(plan, folder / "out", threads=1)
        assert forms["fp8_block", "gpu"] and {device for _, device in forms} == {"gpu"}
