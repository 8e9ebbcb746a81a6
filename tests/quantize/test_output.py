"""The output folder: one run owns it, the source is compared again, and a killed run leaves
nothing.
"""

import errno
import json
import os
import random
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import outputs
import pytest
from keepmtp import pipeline
from keepmtp.checkpoints.files import WORK, partial_path
from keepmtp.checkpoints.source import open_source
from keepmtp.pipeline import plan_for
from keepmtp.quantize.needs import room
from keepmtp.quantize.plan.plan import Plan
from keepmtp.quantize.write.output import claim, refuse_output
from keepmtp.recipes.errors import CheckpointError, RecipeError
from outputs import MODEL, SHARD_BYTES, digests, end, overwrite, start

ROOT = Path(__file__).parent.parent.parent
ONE, OTHER = f"{MODEL}.w4a16-fp8", f"{MODEL}.fp8-dynamic"
TENSOR = "model.layers.1.mlp.experts.0.down_proj.weight"


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory) -> dict[str, dict[str, str]]:
    """What each scheme gives over the shipped model."""
    folder = tmp_path_factory.mktemp("unbroken")
    for scheme in (ONE, OTHER):
        assert end(start(ROOT / "models" / MODEL, folder / scheme, scheme)) == 0, outputs.refusal(
            folder / scheme
        )
    return {scheme: digests(folder / scheme) for scheme in (ONE, OTHER)}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return shutil.copytree(ROOT / "models" / MODEL, tmp_path / MODEL)


def planned(source: Path, scheme: str = ONE) -> tuple[Plan, str]:
    plan, text = plan_for(scheme, source=str(source))
    return replace(plan, shard_bytes=SHARD_BYTES), text


def quantized(source: Path, out: Path, scheme: str = ONE) -> dict[str, str]:
    plan, text = planned(source, scheme)
    pipeline.quantize(plan, text, out=out, threads=2)
    return digests(out)


def shard_of(source: Path, tensor: str) -> Path:
    return (
        source
        / json.loads((source / "model.safetensors.index.json").read_text())["weight_map"][tensor]
    )


def killed_after(source: Path, out: Path, num_shards: int) -> None:
    """Start a run and kill it when that many shards are whole."""
    process = start(source, out, ONE, pause=0.005)
    while len(list(partial_path(out).glob("*.safetensors"))) < num_shards:
        assert process.is_alive(), outputs.refusal(out)
        time.sleep(0.001)
    process.kill()
    process.join()
    assert not out.exists()


# --- one run owns an output -----------------------------------------------------------------------


def test_simultaneous_runs_never_mix(unbroken, tmp_path, source):
    """Two plans start together and the first is killed; whatever is finished then is one plan's,
    whole.
    """
    chance = random.Random(7)
    for number in range(8):
        out = tmp_path / f"out{number}"
        at = time.time() + 0.1
        first, second = (start(source, out, scheme, at=at, pause=0.01) for scheme in (ONE, OTHER))
        time.sleep(0.1 + chance.random() * 0.8)
        chance.choice((first, second)).kill()
        assert {end(first), end(second)} <= {0, 2, -signal.SIGKILL}
        for scheme in chance.sample((ONE, OTHER), 2):
            again = end(start(source, out, scheme))
            assert again in (0, 2)
            if out.exists():
                assert digests(out) in unbroken.values(), f"round {number}: a mixture"
                break
        else:  # each was refused because of the other's unfinished output: do what the refusal says
            assert "Remove it, or choose another OUT" in outputs.refusal(out)
            shutil.rmtree(partial_path(out))
            assert end(start(source, out, ONE)) == 0
            assert digests(out) == unbroken[ONE]


def test_the_lock_comes_before_anything_is_read_or_written(tmp_path, source):
    """A plan that passed its refusals, but was late: the stamp of the run at work stays."""
    (plan, _), (late, _) = planned(source), planned(source, OTHER)
    out = tmp_path / "out"
    refuse_output(late, out)
    with claim(plan, out) as partial:
        stamp = (partial / WORK / "plan.sha256").read_text()
        with pytest.raises(RecipeError, match="only one run may write an output"), claim(late, out):
            pass
        with pytest.raises(
            RecipeError, match="only one run may write an output; got another run at work"
        ):
            refuse_output(late, out)
        assert (partial / WORK / "plan.sha256").read_text() == stamp
    rule = r"out\.partial: an unfinished output can only be resumed"
    with pytest.raises(RecipeError, match=rule), claim(late, out):
        pass
    with pytest.raises(RecipeError, match=rule):
        refuse_output(late, out)
    assert (partial / WORK / "plan.sha256").read_text() == stamp


def test_a_run_that_is_late_leaves_a_finished_output_alone(tmp_path, source):
    plan, _ = planned(source, OTHER)
    out = tmp_path / "out"
    refuse_output(plan, out)
    made = quantized(source, out)
    with (
        pytest.raises(RecipeError, match="an existing output is never overwritten"),
        claim(plan, out),
    ):
        pass
    assert digests(out) == made and not partial_path(out).exists()


# --- the source is the same at the end ------------------------------------------------------------


@pytest.mark.parametrize("keep_times", [False, True])
@pytest.mark.parametrize("num_done", [0, 3])
def test_a_source_that_is_overwritten_during_the_run_is_found(
    num_done, keep_times, tmp_path, source
):
    """The cure is the same command again; it gives what an unbroken run over the new source
    gives.
    """
    out = tmp_path / "out"
    process = start(source, out, ONE, pause=0.01)
    while (
        len(list(partial_path(out).glob("*.safetensors"))) < num_done
        or not partial_path(out).is_dir()
    ):
        assert process.is_alive()
        time.sleep(0.001)
    overwrite(shard_of(source, TENSOR), TENSOR, keep_times=keep_times)
    assert end(process) == 2 and not out.exists()
    said = outputs.refusal(out)
    assert (
        "the source must not change during a run" in said and shard_of(source, TENSOR).name in said
    )
    assert "Run the same command again" in said
    assert end(start(source, out, ONE)) == 0, outputs.refusal(out)
    assert digests(out) == quantized(source, tmp_path / "new")


@pytest.mark.parametrize("way", ["overwritten", "swapped"])
def test_a_source_that_changes_between_kill_and_resume_is_found(way, tmp_path, source):
    """With size and time kept. Shards that were made from the old bytes are written again."""
    out = tmp_path / "out"
    old = quantized(source, tmp_path / "old")
    killed_after(source, out, num_shards=8)
    shard = shard_of(source, TENSOR)
    if way == "swapped":
        shutil.copy2(shard, tmp_path / "copy")
        os.replace(tmp_path / "copy", shard)
    overwrite(shard, TENSOR, keep_times=True)
    made = quantized(source, out)
    assert made == quantized(source, tmp_path / "new") != old


# --- a finished shard is what was written ---------------------------------------------------------


def flip_a_bit(shards: list[Path]) -> None:
    raw = bytearray(shards[1].read_bytes())
    raw[-5] ^= 4
    shards[1].write_bytes(raw)


def truncate(shards: list[Path]) -> None:
    os.truncate(shards[1], shards[1].stat().st_size - 100)


def swap_two(shards: list[Path]) -> None:
    first, second = shards[0].read_bytes(), shards[1].read_bytes()
    shards[0].write_bytes(second)
    shards[1].write_bytes(first)


def lose_hashes(shards: list[Path]) -> None:
    (shards[1].parent / WORK / f"{shards[1].name}.sha256").unlink()


@pytest.mark.parametrize("damage", [flip_a_bit, truncate, swap_two, lose_hashes])
def test_a_damaged_shard_is_named_and_written_again(damage, tmp_path, source, unbroken, caplog):
    out = tmp_path / "out"
    killed_after(source, out, num_shards=3)
    shards = sorted(partial_path(out).glob("*.safetensors"))
    damage(shards)
    assert quantized(source, out) == unbroken[ONE]
    named = [
        record.getMessage() for record in caplog.records if shards[1].name in record.getMessage()
    ]
    assert len(named) == 1 and "It is written again" in named[0]


def test_a_file_that_no_run_wrote_is_not_carried_along(tmp_path, source):
    plan, text = planned(source)
    out = tmp_path / "out"
    killed_after(source, out, num_shards=1)
    (partial_path(out) / "notes.txt").write_text("mine")
    with pytest.raises(
        CheckpointError,
        match=r"nothing but what this run wrote; got notes\.txt\. Move these files away",
    ):
        pipeline.quantize(plan, text, out=out, threads=2)
    (partial_path(out) / "notes.txt").unlink()
    pipeline.quantize(plan, text, out=out, threads=2)


# --- what is left, and what a second run says -----------------------------------------------------


def beside(out: Path) -> list[str]:
    return sorted(path.name for path in out.parent.iterdir() if path.name.startswith(out.name))


def test_a_run_that_was_killed_after_its_end_is_finished(tmp_path, source, unbroken, monkeypatch):
    """Between the final name and the removal of hashes; the same command cleans up and is
    content.
    """
    out = tmp_path / "out"
    monkeypatch.setattr("keepmtp.quantize.write.output.tidy", lambda _, **__: None)
    quantized(source, out)
    monkeypatch.undo()
    (tmp_path / "out.calibration" / "states").mkdir(parents=True)
    partial_path(out).mkdir()
    plan, text = planned(source)
    run = pipeline.quantize(plan, text, out=out)
    assert run.was_there and run.report.ok
    assert digests(out) == unbroken[ONE] and beside(out) == ["out"]


def test_a_finished_output_of_another_run_is_refused(tmp_path, source):
    out = tmp_path / "out"
    out.mkdir()  # an empty folder is no output yet
    quantized(source, out)
    with pytest.raises(RecipeError, match="never overwritten; got a finished checkpoint"):
        quantized(source, out, OTHER)
    overwrite(shard_of(source, TENSOR), TENSOR, keep_times=True)
    with pytest.raises(RecipeError, match="never overwritten; got a finished checkpoint"):
        quantized(source, out)


def test_nothing_is_left_next_to_an_output(tmp_path, source):
    out = tmp_path / "out"
    killed_after(source, out, num_shards=2)
    kept = {path.name: path.stat().st_mtime_ns for path in partial_path(out).glob("*.safetensors")}
    quantized(source, out)
    assert beside(out) == ["out"] and not (out / WORK).exists()
    now = {name: (out / name).stat().st_mtime_ns for name in kept}
    assert now == kept, "whole shards are not written again"


# --- places ---------------------------------------------------------------------------------------


def refusal_of_place(out: Path, source: Path) -> str:
    plan, _ = planned(source)
    with pytest.raises(RecipeError) as caught:
        refuse_output(plan, out)
    assert not partial_path(out).exists()
    return str(caught.value)


def test_a_place_that_cannot_hold_the_output_is_refused(tmp_path, source, monkeypatch):
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("nowhere")
    for out, says in (
        (tmp_path / "file" / "sub", f"must be in a folder; got {tmp_path}/file, a file"),
        (tmp_path / "file", "got a file."),
        (tmp_path / "link", "got a link."),
        (source.parent, "got a folder with files in it."),
        (source / "out", "must lie outside the source"),
        (Path("/proc"), "got the root of a disk."),
    ):
        assert says in refusal_of_place(out, source)
    monkeypatch.setattr(os, "access", lambda *_: False)
    said = refusal_of_place(tmp_path / "out", source)
    assert f"got {tmp_path}, which you cannot write to." in said


def test_a_disk_that_becomes_full_is_named(tmp_path, source, monkeypatch):
    """The same command goes on once there is room."""
    real, written = os.pwrite, []

    def full(*words) -> int:
        written.append(words)
        if len(written) > 40:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*words)

    monkeypatch.setattr(os, "pwrite", full)
    out = tmp_path / "out"
    with pytest.raises(
        OSError, match=r"No space left on device.*out\.partial.*\.safetensors\.partial"
    ):
        quantized(source, out)
    monkeypatch.undo()
    quantized(source, out)


def test_room_counts_everything_that_is_written(tmp_path, source):
    """Weights, tokenizer, index, hashes; and for a calibrated plan its states and statistics."""
    plan, text = planned(source)
    out = tmp_path / "out"
    partial = partial_path(out)
    from keepmtp.quantize.write.writer import write

    with claim(plan, out):
        write(plan, partial, recipe_text=text, threads=1)
    there = sum(path.stat().st_size for path in partial.rglob("*") if path.is_file())
    assert plan.num_bytes_after < there <= room.output_bytes(plan)
    assert room.calibration_bytes(plan) == 0
    calibrated, text = plan_for(MODEL, source=str(source), scheme="fp8")
    pipeline.quantize(calibrated, text, out=tmp_path / "fp8", keep_calibration=True)
    folder = room.calibration_folder(tmp_path / "fp8")
    kept = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert kept <= room.calibration_bytes(calibrated) + room._FIXED_BYTES


def test_little_room_is_told(tmp_path, source, monkeypatch):
    plan, _ = planned(source)
    free = room.output_bytes(plan) - 1
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=free))
    said = refusal_of_place(tmp_path / "out", source)
    assert "MiB must be free on its disk; got 1 bytes too little." in said


def test_the_states_of_a_source_are_of_all_its_files(source):
    opened = open_source(source)
    read = {entry.file for entry in opened.entries.values()}
    assert opened.states.keys() == {
        *read,
        *opened.companions,
        "config.json",
        "model.safetensors.index.json",
    }
