"""The next layer's files, read while this one computes, and what a layer's weights take of
memory.
"""

import os
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from calibrated import planned
from keepmtp.checkpoints import values
from keepmtp.checkpoints.safetensors_file import Entry
from keepmtp.checkpoints.source import Source
from keepmtp.quantize.calibrate.model import skeleton as module
from keepmtp.quantize.calibrate.model.skeleton import Skeleton, reading_ahead
from keepmtp.quantize.plan.plan import Plan
from keepmtp.recipes.errors import CheckpointError

CPU = torch.device("cpu")
# Plain weights, FP8 in blocks, MXFP4, experts in stacks.
MODELS = ("glm-4.7", "deepseek-v3.1", "dsv4-flash", "qwen3.5-397b")


@pytest.fixture(scope="module", params=MODELS)
def plan(request, tmp_path_factory) -> Plan:
    schemes = {"attention": "bf16"} if request.param.startswith(("deepseek", "ds")) else {}
    return planned(
        tmp_path_factory.mktemp(request.param) / "source",
        model=request.param,
        data="random",
        **schemes,
    )


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


def test_each_byte_of_a_layer_is_read_once_and_of_the_next_one_meanwhile(
    plan, num_read, monkeypatch
):
    skeleton = Skeleton(plan, device=CPU)
    ahead: Counter[str] = Counter()
    done, last = threading.Event(), len(skeleton) - 1
    now, then = (
        {n: plan.entries[n].num_bytes for each in skeleton.tensors_of(index) for n in each.inputs}
        for index in (last - 1, last)
    )

    def read(_source: Source, entry: Entry, into: memoryview, *, offset: int = 0) -> None:
        ahead[entry.name] += len(into)
        if ahead == then:
            done.set()

    monkeypatch.setattr(module, "read", read)
    num_read.clear()
    with skeleton.layer(last - 1, last):
        assert num_read == now, "gate and up of a stack are one tensor"
        assert done.wait(10)


def test_an_expert_keeps_no_more_memory_than_its_own(tmp_path):
    """Gate and up of a stack are views of what was read for both."""
    plan = planned(tmp_path / "source", model="qwen3.5-397b")
    skeleton = Skeleton(plan, device=CPU)
    with skeleton.layer(0) as layer:
        storages = {each.untyped_storage() for each in layer.parameters()}
        found = {each.data_ptr(): each.nbytes() for each in storages}
        assert sum(found.values()) == sum(each.nbytes for each in layer.parameters())


def test_a_shard_that_ends_early_is_named_when_its_layer_begins(tmp_path):
    plan = planned(tmp_path / "source")
    skeleton = Skeleton(plan, device=CPU)
    entry = plan.entries[skeleton.tensors_of(1)[0].inputs[0]]
    os.truncate(Path(tmp_path / "source" / entry.file), entry.start + 1)
    with reading_ahead(plan, skeleton.tensors_of(1)):
        pass
    rule = rf"{entry.file}: {entry.name} must be whole; got end of file"
    with pytest.raises(CheckpointError, match=rule), skeleton.layer(1):
        pass


def test_an_end_in_the_middle_waits_for_no_more_than_a_piece(tmp_path, monkeypatch):
    plan, calls, begun = planned(tmp_path / "source"), [], threading.Event()

    def read(*_args: object, **_words: object) -> None:
        calls.append(1)
        begun.set()
        time.sleep(0.2)

    monkeypatch.setattr(module, "read", read)
    with (
        pytest.raises(KeyboardInterrupt),
        reading_ahead(plan, Skeleton(plan, device=CPU).tensors_of(1)),
    ):
        assert begun.wait(10)
        raise KeyboardInterrupt
    assert len(calls) == 1
