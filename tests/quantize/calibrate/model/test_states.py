"""Hidden states between layers: any rows of them, from memory and from disk, whoever wrote them;
full disks, kills.
"""

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from keepmtp.checkpoints.files import unwritable
from keepmtp.quantize.calibrate.model import states as module
from keepmtp.quantize.calibrate.model.states import States
from keepmtp.quantize.needs import memory
from keepmtp.quantize.needs.memory import free_host_bytes
from keepmtp.recipes.errors import CheckpointError
from passes import ALONE

HIDDEN = torch.randn(11, 3, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
INDICES = torch.arange(11 * 3 * 2).reshape(11, 3, 2)


def state(first: int, last: int) -> tuple[torch.Tensor | None, ...]:
    """What a layer returns that hands on more than hidden states, with a gap."""
    return HIDDEN[first:last].clone(), None, INDICES[first:last].clone()


def written(folder: Path, sizes: list[int]) -> States:
    """States of 11 rows in batches of these sizes."""
    (folder / "states").mkdir(exist_ok=True)
    found = States(folder / "states", ALONE)
    first = 0
    with found.writing(1) as outputs:
        for size in sizes:
            outputs.put("calibration", first, state(first, first + size))
            first += size
    return found


def check(found: States, first: int, last: int) -> None:
    hidden, nothing, indices = found.read(1, "calibration", first, last)
    assert nothing is None and hidden is not None and indices is not None
    assert torch.equal(hidden, HIDDEN[first:last]) and torch.equal(indices, INDICES[first:last])
    hidden.zero_()


def test_any_rows_can_be_read_whatever_batches_wrote_them(tmp_path):
    """And nobody changes what is kept."""
    found = written(tmp_path, [4, 4, 3])
    for size in (1, 2, 3, 5, 11):
        for first in range(0, 11, size):
            check(found, first, min(first + size, 11))


def test_states_of_the_layer_before_are_removed_but_where_they_are_kept(tmp_path):
    found = written(tmp_path, [11])
    both = ["00002", "00003"]
    for index, keeps, expected in ((2, False, ["00002"]), (3, True, both), (3, True, both)):
        with found.writing(index, keeps=keeps) as outputs:
            outputs.put("calibration", 0, state(0, 11))
        assert left(tmp_path) == expected
        assert found.num_done() == index


def test_an_error_while_a_layer_runs_leaves_the_states_that_it_reads(tmp_path):
    found = written(tmp_path, [11])
    with pytest.raises(KeyboardInterrupt), found.writing(2) as outputs:
        outputs.put("calibration", 0, state(0, 11))
        raise KeyboardInterrupt
    again = States(tmp_path / "states", ALONE)
    again.tidy()
    assert again.num_done() == 1
    assert left(tmp_path) == ["00001"]
    check(again, 0, 11)


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "states").iterdir())


def test_only_states_on_the_disk_count_after_the_machine_has_stopped(tmp_path, monkeypatch):
    """Of layers 1 to 4, the second is written when it is due."""
    waited = []
    monkeypatch.setattr(module, "sync", waited.append)
    found = States(tmp_path / "states", ALONE)
    for index in (1, 2, 3, 4):
        monkeypatch.setattr(module, "_LASTING_SECONDS", 0 if index == 2 else 300)
        with found.writing(index) as outputs:
            outputs.put("calibration", 0, state(0, 11))
    assert [path.parent.name for path in waited] == ["00002.partial"]
    assert left(tmp_path) == ["00002", "00004"]
    again = States(tmp_path / "states", ALONE)
    again.tidy()
    assert again.num_done() == 4 and left(tmp_path) == ["00002", "00004"]
    monkeypatch.setattr(module, "_boot", lambda: "another")
    assert again.num_done() == 2
    again.tidy()
    assert left(tmp_path) == ["00002"]


@pytest.mark.parametrize("boot, local_size", [("", 2), ("this", 1)])
def test_a_system_without_a_boots_name_and_several_nodes_wait_for_the_disk(
    boot, local_size, tmp_path, monkeypatch
):
    monkeypatch.setattr(module, "_boot", lambda: boot)
    assert States(tmp_path, replace(ALONE, size=2, local_size=local_size))._is_due()


def test_states_that_a_kill_left_half_removed_do_not_count(tmp_path, monkeypatch):
    """Their mark may be gone, and a file of them still there."""
    found = written(tmp_path, [11])

    def rmtree(folder: Path, **_choices: object) -> None:
        if folder.exists():
            (folder / module._MARK).unlink()
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(module.shutil, "rmtree", rmtree)
        with pytest.raises(KeyboardInterrupt), found.writing(2) as outputs:
            outputs.put("calibration", 0, state(0, 11))
    monkeypatch.setattr(module, "_boot", lambda: "another")
    again = States(tmp_path / "states", ALONE)
    assert again.num_done() == 0
    again.tidy()
    assert left(tmp_path) == []


def test_a_full_disk_ends_the_layer_in_a_sentence(tmp_path, monkeypatch):
    real = module.save

    def save(tensors: dict, path: Path, metadata: dict) -> None:
        if "calibration-000004" in path.name:
            raise unwritable(path, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        real(tensors, path, metadata)

    monkeypatch.setattr(module, "save", save)
    rule = r"000004-000008\.safetensors: must be writable; got No space left on device\. Make"
    with pytest.raises(CheckpointError, match=rule):
        written(tmp_path, [4, 4, 3])
    assert States(tmp_path / "states", ALONE).num_done() == 0


def test_missing_and_damaged_files_are_named(tmp_path):
    found = written(tmp_path, [4, 4, 3])
    path = tmp_path / "states" / "00001" / "calibration-000004-000008.safetensors"
    os.truncate(path, path.stat().st_size - 1)
    rule = "00001: rows 3 to 4 of calibration must be there; got "
    cure = rf"\. Remove {tmp_path}, and run the same command again: calibration starts anew\."
    with pytest.raises(CheckpointError, match=f"{rule}{path.name}: .*{cure}"):
        found.read(1, "calibration", 3, 5)
    path.unlink()
    with pytest.raises(CheckpointError, match=f"{rule}no row 4{cure}"):
        found.read(1, "calibration", 3, 5)


def test_free_memory_is_the_machines_or_what_a_container_leaves(tmp_path):
    assert free_host_bytes() > 2**20
    meminfo = tmp_path / "meminfo"
    groups = tmp_path / "groups"
    meminfo.write_text("MemTotal:       24000 kB\nMemAvailable:   18000 kB\n")
    groups.mkdir()
    assert free_host_bytes(meminfo=meminfo, groups=groups) == 18000 * 1024
    (groups / "memory.current").write_text("3000\n")
    for limit, left in (("max", 18000 * 1024), ("5000", 2000), ("2000", 0)):
        (groups / "memory.max").write_text(f"{limit}\n")
        assert free_host_bytes(meminfo=meminfo, groups=groups) == left, limit
    assert [limit for limit, _ in memory._LIMITS] == [
        "memory.max",
        "memory/memory.limit_in_bytes",
    ]
