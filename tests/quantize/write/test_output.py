"""The output folder: one run owns it, the source is compared again, and a killed run leaves
nothing.
"""

import errno
import os
import shutil
import signal
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from logging import LogRecord
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import outputs
import pytest
from commands import ROOT
from data_files import json_of
from keepmtp import pipeline
from keepmtp.checkpoints.files import WORK, held, partial_path
from keepmtp.checkpoints.source import open_source
from keepmtp.cli.main import app
from keepmtp.pipeline import plan_for
from keepmtp.quantize.needs import room
from keepmtp.quantize.plan.plan import Plan
from keepmtp.quantize.run.progress import SILENT, RunProgress
from keepmtp.quantize.write.output import claim, refuse_output
from keepmtp.quantize.write.writer import write
from keepmtp.recipes.errors import CheckpointError, GateError, RecipeError
from keepmtp.recipes.frozen import Advance
from outputs import MODEL, SHARD_BYTES, digests, end, ended_at, overwrite, start
from processes import forked
from typer.testing import CliRunner

ONE, OTHER = f"{MODEL}.w4a16-fp8", f"{MODEL}.fp8-dynamic"
TENSOR = "model.layers.1.mlp.experts.0.down_proj.weight"


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory) -> dict[str, dict[str, str]]:
    """What each scheme gives over the shipped model."""
    folder = tmp_path_factory.mktemp("unbroken")
    return {each: quantized(ROOT / "models" / MODEL, folder / each, each) for each in (ONE, OTHER)}


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


def shard_of(source: Path) -> Path:
    """Where TENSOR is."""
    return source / json_of(source / "model.safetensors.index.json")["weight_map"][TENSOR]


def held_after(source: Path, out: Path, num_shards: int) -> ForkServerProcess:
    """Start a run that is held when that many shards are whole."""
    process = start(source, out, ONE, hold=num_shards)
    while not outputs.held(out).exists():
        assert process.is_alive(), outputs.refusal(out)
        time.sleep(0.001)
    return process


def killed_after(source: Path, out: Path, num_shards: int) -> None:
    """Start a run and kill it when that many shards are whole."""
    process = held_after(source, out, num_shards)
    process.kill()
    process.join()
    outputs.held(out).unlink()
    assert not out.exists()


# --- one run owns an output -----------------------------------------------------------------------


def test_the_lock_comes_before_anything_is_read_or_written(tmp_path, source):
    """A plan that passed its refusals, but was late: the stamp of the run at work stays."""
    (plan, _), (late, _) = planned(source), planned(source, OTHER)
    out = tmp_path / "out"
    refuse_output(late, out)
    with claim(plan, out) as partial:
        stamp = (partial / WORK / "plan.sha256").read_text()
        at_work = "only one run may write an output; got another run at work"
        with pytest.raises(RecipeError, match=at_work), claim(late, out):
            pass
        with pytest.raises(RecipeError, match=at_work):
            refuse_output(late, out)
        assert (partial / WORK / "plan.sha256").read_text() == stamp
    rule = r"out\.partial: an unfinished output can only be resumed"
    with pytest.raises(RecipeError, match=rule), claim(late, out):
        pass
    with pytest.raises(RecipeError, match=rule):
        refuse_output(late, out)
    assert (partial / WORK / "plan.sha256").read_text() == stamp


# --- the source is the same at the end ------------------------------------------------------------


@pytest.mark.few(2)
@pytest.mark.parametrize("keep_times", [False, True])
@pytest.mark.parametrize("num_done", [0, 3])
def test_a_source_that_is_overwritten_during_the_run_is_found(
    num_done, keep_times, tmp_path, source
):
    """The cure is the same command again; it gives what an unbroken run over the new source
    gives.
    """
    out = tmp_path / "out"
    process = held_after(source, out, num_done)
    overwrite(shard_of(source), TENSOR, keep_times=keep_times)
    outputs.held(out).unlink()
    assert end(process) == 2 and not out.exists()
    said = outputs.refusal(out)
    for words in ("must not change during a run", shard_of(source).name, "the same command again"):
        assert words in said
    assert end(start(source, out, ONE)) == 0, outputs.refusal(out)
    assert digests(out) == quantized(source, tmp_path / "new")


@pytest.mark.parametrize("way", ["overwritten", "swapped"])
def test_a_source_that_changes_between_kill_and_resume_is_found(way, tmp_path, source):
    """With size and time kept. Shards that were made from the old bytes are written again."""
    out = tmp_path / "out"
    old = quantized(source, tmp_path / "old")
    killed_after(source, out, num_shards=8)
    shard = shard_of(source)
    if way == "swapped":
        shutil.copy2(shard, tmp_path / "copy")
        os.replace(tmp_path / "copy", shard)
    overwrite(shard, TENSOR, keep_times=True)
    assert quantized(source, out) == quantized(source, tmp_path / "new") != old


# --- shards that stay are links, which change what the source's files say ------------------------


@pytest.fixture
def finished(tmp_path) -> Path:
    """A checkpoint of two shards, one of which stays when its head changes."""
    plan, text = plan_for(f"{MODEL}.nvfp4a16-fp8", source=str(ROOT / "models" / MODEL))
    pipeline.quantize(plan, text, out=tmp_path / "finished", threads=1)
    return tmp_path / "finished"


KEPT = "model-00002-of-00002.safetensors"


def with_another_head(finished: Path, out: Path, progress: RunProgress = SILENT) -> dict[str, str]:
    plan, text = plan_for(str(finished), changes=["head=FP8_DYNAMIC"])
    pipeline.quantize(plan, text, out=out, threads=1, progress=progress)
    assert (out / KEPT).samefile(finished / KEPT)
    return digests(out)


@pytest.mark.parametrize(
    "after", [pytest.param(after, marks=pytest.mark.full) for after in (0, 2, 4, 7)] + [1]
)
def test_a_run_that_was_killed_when_it_had_linked_is_finished(after, tmp_path, finished):
    """So many calls of the file system after the first link, and again."""
    with pytest.MonkeyPatch.context() as patched:
        calls = ended_at(0, patched, lambda: None)
        whole = with_another_head(finished, tmp_path / "whole")
    step = calls.index("link") + 1 + after
    shutil.rmtree(tmp_path / "whole")

    def killed() -> None:
        ended_at(step, pytest.MonkeyPatch(), lambda: os.kill(os.getpid(), signal.SIGKILL))
        with_another_head(finished, tmp_path / "out")

    assert forked(killed, seconds=60).code == -signal.SIGKILL
    forked(killed, seconds=60)
    assert with_another_head(finished, tmp_path / "out") == whole


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), GateError("out", "its rule", got="less", cure="Wait")], ids=repr
)
def test_a_run_that_ends_in_its_own_check_is_finished(error, tmp_path, finished, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("keepmtp.validate.check.values.refuse_broken_values", refuse)
    with pytest.raises(type(error)):
        with_another_head(finished, tmp_path / "out")
    monkeypatch.undo()
    words = f"quantize {finished} --set head=FP8_DYNAMIC --out {tmp_path}/out"
    ended = CliRunner().invoke(app, words.split(), catch_exceptions=False)
    assert ended.exit_code == 0
    assert "Unchanged files are hard links: an edit of one in place" in " ".join(
        ended.output.split()
    )


@pytest.mark.parametrize(
    "way", ["an older output goes", "another one comes", "written, dated back"]
)
def test_links_of_a_source_come_and_go_and_its_bytes_stay(way, tmp_path, finished):
    """While the shards are packed."""
    kept, older = finished / KEPT, tmp_path / "older"
    os.link(kept, older)

    def meanwhile(_: int) -> AbstractContextManager[Advance]:
        if way == "an older output goes":
            older.unlink()
        elif way == "another one comes":
            os.link(kept, tmp_path / "newer")
        else:
            overwrite(kept, "model.layers.3.enorm.weight", keep_times=True)
        return nullcontext(lambda _: None)

    refused = nullcontext()
    if way == "written, dated back":
        refused = pytest.raises(CheckpointError, match=f"during a run; got another {KEPT}")
    with refused:
        with_another_head(finished, tmp_path / "out", RunProgress(packing=meanwhile))


# --- a finished shard is what was written ---------------------------------------------------------


def truncate(shard: Path) -> None:
    os.truncate(shard, shard.stat().st_size - 100)


def take_anothers(shard: Path) -> None:
    shutil.copyfile(min(shard.parent.glob("*.safetensors")), shard)


def lose_hashes(shard: Path) -> None:
    (shard.parent / WORK / f"{shard.name}.sha256").unlink()


@pytest.mark.few(2)
@pytest.mark.parametrize("damage", [truncate, take_anothers, lose_hashes])
def test_a_damaged_shard_is_named_and_written_again(damage, tmp_path, source, unbroken, caplog):
    """And no other one is; nothing is left next to the output."""
    out = tmp_path / "out"
    killed_after(source, out, num_shards=3)
    first, shard, *others = sorted(partial_path(out).glob("*.safetensors"))
    times = {path.name: path.stat().st_mtime_ns for path in (first, *others)}
    damage(shard)
    assert quantized(source, out) == unbroken[ONE]
    (named,) = (each for each in map(LogRecord.getMessage, caplog.records) if shard.name in each)
    assert "It is written again" in named
    assert {name: (out / name).stat().st_mtime_ns for name in times} == times
    assert beside(out) == ["out"] and not (out / WORK).exists()


def test_a_file_that_no_run_wrote_is_not_carried_along(tmp_path, source):
    out = tmp_path / "out"
    killed_after(source, out, num_shards=1)
    (partial_path(out) / "notes.txt").write_text("mine")
    rule = r"nothing but what this run wrote; got notes\.txt\. Move these files away"
    with pytest.raises(CheckpointError, match=rule):
        quantized(source, out)
    (partial_path(out) / "notes.txt").unlink()
    quantized(source, out)


# --- what is left, and what a second run says -----------------------------------------------------


def beside(out: Path) -> list[str]:
    return sorted(path.name for path in out.parent.iterdir() if path.name.startswith(out.name))


def test_a_run_that_was_killed_after_its_end_is_finished(tmp_path, source, unbroken, monkeypatch):
    """Between the final name and the removal of hashes; the same command cleans up and is
    content.
    """
    out = tmp_path / "out"
    monkeypatch.setattr("keepmtp.quantize.write.output.tidied", lambda _, **__: None)
    quantized(source, out)
    monkeypatch.undo()
    (tmp_path / "out.calibration" / "states").mkdir(parents=True)
    partial_path(out).mkdir()
    plan, text = planned(source)
    run = pipeline.quantize(plan, text, out=out)
    assert run.was_there and run.report.ok
    assert digests(out) == unbroken[ONE] and beside(out) == ["out"]


def test_an_output_stays_finished_where_others_link_its_source(tmp_path, source, caplog):
    """A release is linked by who changes one group of it; a link that comes or goes changes its
    ctime alone."""
    out = tmp_path / "out"
    quantized(source, out)
    linked = tmp_path / "linked.safetensors"
    os.link(shard_of(source), linked)
    plan, text = planned(source)
    with held(out / WORK / "again", ""), pytest.raises(RecipeError, match="another run at work"):
        pipeline.quantize(plan, text, out=out)
    assert pipeline.quantize(plan, text, out=out).was_there
    assert "made again" in caplog.text
    caplog.clear()
    assert pipeline.quantize(plan, text, out=out).was_there
    assert "made again" not in caplog.text
    linked.unlink()
    for name in ("config.json", plan.companions[0]):
        os.link(source / name, linked)
        linked.unlink()
    plan, text = planned(source)
    assert pipeline.quantize(plan, text, out=out).was_there


@pytest.mark.parametrize("is_linked", [False, True])
@pytest.mark.parametrize("old", ['"initializer_range": 0.04', '"content": "<pad>"', ""])
def test_a_source_of_other_bytes_and_the_same_times_is_found(old, is_linked, tmp_path, source):
    """As `cp -p` writes it: config.json, the tokenizer, a shard."""
    out = tmp_path / "out"
    quantized(source, out)
    path = shard_of(source)
    if old:
        (path,) = [each for each in source.glob("*[gr].json") if old in each.read_text()]
        before = path.stat()
        path.write_text(path.read_text().replace(old, old.swapcase()))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    else:
        overwrite(path, TENSOR, keep_times=True)
    if is_linked:
        os.link(path, tmp_path / "linked")
    with pytest.raises(RecipeError, match="never overwritten; got a finished checkpoint"):
        quantized(source, out)
    assert not (out / WORK).exists()


def test_a_finished_output_of_another_run_is_refused(tmp_path, source):
    """Before the run, and when a plan is late."""
    plan, _ = planned(source, OTHER)
    out = tmp_path / "out"
    out.mkdir()  # an empty folder is no output yet
    refuse_output(plan, out)
    made = quantized(source, out)
    with pytest.raises(RecipeError, match="existing output is never overwritten"), claim(plan, out):
        pass
    assert digests(out) == made and not partial_path(out).exists()
    for scheme in (OTHER, ONE):
        with pytest.raises(RecipeError, match="never overwritten; got a finished checkpoint"):
            quantized(source, out, scheme)
        overwrite(shard_of(source), TENSOR, keep_times=True)


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
    said = {
        tmp_path / "file" / "sub": f"must be in a folder; got {tmp_path}/file, a file",
        tmp_path / "file": "got a file.",
        tmp_path / "link": "got a link.",
        source.parent: "got a folder with files in it.",
        source / "out": "must lie outside the source",
        Path("/proc"): "got the root of a disk.",
    }
    for out, says in said.items():
        assert says in refusal_of_place(out, source)
    free = shutil.disk_usage(tmp_path)._replace(free=room.output_bytes(planned(source)[0]) - 1)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: free)
        said = refusal_of_place(tmp_path / "out", source)
    assert "MiB must be free on its disk; got 1 byte too little." in said
    monkeypatch.setattr(os, "access", lambda *_: False)
    said = refusal_of_place(tmp_path / "out", source)
    assert f"got {tmp_path}, which you cannot write to." in said


@pytest.mark.parametrize(
    "place", [".partial", ".partial/.keepmtp", ".calibration", ".calibration/mtp"]
)
def test_a_link_at_a_name_of_the_output_is_refused(place, tmp_path, source):
    before, link = digests(source), Path(f"{tmp_path}/out{place}")
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(source)
    with pytest.raises(RecipeError, match=rf"{link}: .*; got a link"):
        quantized(source, tmp_path / "out")
    assert digests(source) == before


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
    rule = r"No space left on device.*out\.partial.*\.safetensors\.partial"
    with pytest.raises(OSError, match=rule):
        quantized(source, out)
    monkeypatch.undo()
    quantized(source, out)


@pytest.mark.full
def test_room_counts_everything_that_is_written(tmp_path, source):
    """Weights, tokenizer, index, hashes; and for a calibrated plan its states and statistics."""
    plan, text = planned(source)
    with claim(plan, tmp_path / "out") as partial:
        write(plan, partial, recipe_text=text, threads=1)
    there = sum(path.stat().st_size for path in partial.rglob("*") if path.is_file())
    assert plan.num_bytes_after < there <= room.output_bytes(plan)
    assert room.calibration_bytes(plan) == 0
    calibrated, text = plan_for(MODEL, source=str(source), scheme="fp8")
    pipeline.quantize(calibrated, text, out=tmp_path / "fp8", keep_calibration=True)
    folder = room.calibration_folder(tmp_path / "fp8")
    kept = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert kept <= room.calibration_bytes(calibrated) + room._FIXED_BYTES


def test_the_states_of_a_source_are_of_all_its_files(source):
    opened = open_source(source)
    read = {entry.file for entry in opened.entries.values()}
    files = {"config.json", "model.safetensors.index.json", *opened.companions}
    assert opened.states.keys() == read | files
