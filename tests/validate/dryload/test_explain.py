"""`keepmtp explain`: groups of modules, logs, and the two together, as people use it; and that each
known failure is found by the text that its public thread quotes.
"""

import fcntl
import json
import os
import re
import signal
import subprocess
import termios
import time
import tomllib
from functools import partial
from pathlib import Path

import pytest
from checkpoint_files import Checkpoint, as_source, ignoring, write
from commands import KEEPMTP, refused
from good import llmcompressor, ours, released
from keepmtp.checkpoints.dialects.runtime_view import RuntimeView
from keepmtp.cli import main
from keepmtp.recipes.families import find_view
from keepmtp.validate.check.check import Checked, check
from keepmtp.validate.check.rules_forms import stored_form_is_what_is_built
from keepmtp.validate.dryload.explain import MOST_BYTES, Explanation, explain, parse_log, read_log
from keepmtp.validate.dryload.failures import (
    Silence,
    known,
    known_defect,
    known_failure,
    silent_defect,
)
from keepmtp.validate.facts.dry_load import LoadFailure
from modelopt_form import block_experts, mixed, modelopt
from printed import printed
from typer.testing import CliRunner

MISSING = b"ValueError: MTP speculative decoding layer 3 weights missing from checkpoint. The"
FRAME = '  File "/usr/local/lib/python3.12/dist-packages/vllm/{}", line {}, in load_weights\n'
ROWS = [row for rows in known().values() for row in rows]
SAID = tomllib.loads((Path(__file__).parent / "said.toml").read_text())


def lines_of(kind: str) -> list[object]:
    """(name of the failure, where it was read or its version, line), each with its id."""
    found = []
    for name, lines in SAID[kind].items():
        for origin, line in lines.items():
            found.append(pytest.param(name, origin, line, id=f"{name}: {origin}"))
    return found


def keepmtp(*words: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([KEEPMTP, "explain", *words], input=stdin, capture_output=True)


def run(folder: Path, *words: str) -> str:
    done = CliRunner().invoke(main.app, ["explain", str(folder), *words])
    assert done.exit_code == 0, done.output
    return done.stdout


def told(log: bytes, checked: Checked | None = None) -> Explanation:
    return explain(checked, parse_log(log))


def checked(checkpoint: Checkpoint, tmp_path: Path) -> Checked:
    source = as_source(checkpoint, tmp_path)
    runtime = RuntimeView(source=source, view=find_view(source.config, source.where))
    return Checked(check(source), source, runtime)


def silent() -> Checkpoint:
    """A BF16 MTP layer that the FP8 group claims."""
    checkpoint = llmcompressor("glm-4.7", "FP8_DYNAMIC")
    ignoring(without=r"layers\.3")(checkpoint)
    return checkpoint


def one_layer_plain() -> Checkpoint:
    checkpoint = llmcompressor("qwen3.5-397b", "FP8_DYNAMIC")
    ignoring("model.language_model.layers.3.self_attn.o_proj")(checkpoint)
    return checkpoint


# --- what is printed ------------------------------------------------------------------------------

PRINTED = {
    "llm-compressor": partial(llmcompressor, "glm-4.7", "FP8_DYNAMIC"),
    "released": partial(released, "glm-4.7"),
    "native": partial(released, "deepseek-r1"),
    "modelopt": partial(modelopt, "glm-4.7", "NVFP4", "bf16"),
    "mixed": partial(mixed, "glm-4.7", "FP8"),
    "w4a16": partial(ours, "glm-4.7", "W4A16"),
    "one layer plain": one_layer_plain,
    "silent": silent,
}
LOGS = {
    "an acceptance": b"Avg Draft acceptance rate: 0.2%\n",
    "a general failure": b"KeyError: 'model.layers.3.mlp.shared_expert.no_proj.weight'\n",
}


def test_groups_of_modules_and_what_a_log_says_of_them(tmp_path):
    """Each group has its form and the entry that decides; of a log, the failure, its culprit and
    its cure.
    """
    text = ""
    for name, make in PRINTED.items():
        write(tmp_path / name, make())
        text += f"== {name}\n\n{run(tmp_path / name)}\n"
    for name, log in LOGS.items():
        (tmp_path / "log").write_bytes(log)
        said = run(tmp_path / "silent", "--log", str(tmp_path / "log"))
        text += f"== {name}\n\n{said.partition(chr(10) * 2)[2]}\n"
    printed("explain.txt", re.sub(" +\n", "\n", text.replace(f"{tmp_path}/", "")))
    found = Explanation.model_validate_json(run(tmp_path / "silent", "--json"))
    assert found.family == "glm4_moe" and found.log_lines is None


def test_the_commands_that_cure_can_be_typed():
    for command in {row.command for row in ROWS if row.command}:
        verb, *words = command.split()
        options = {name for option in main._load(verb).params for name in option.opts}
        assert {word for word in words if word.startswith("-")} <= options, command


# --- known failures -------------------------------------------------------------------------------


@pytest.mark.parametrize("name, thread, line", lines_of("said"))
def test_the_words_of_a_thread_name_the_failure(name, thread, line):
    (parsed,) = parse_log(line.encode()).lines
    found = known_failure(parsed)
    assert found is not None and found[0].name == name


@pytest.mark.parametrize("row", SAID["raised"], ids=lambda row: row["origin"])
def test_the_place_of_an_exception_tells_a_defect_from_a_fault(row):
    (answer,) = told(f"{row['frame']}\n{row['line']}\n".encode()).answers
    assert answer.failure.name == row["name"] and not answer.failure.is_general
    (answer,) = told(row["line"].encode()).answers
    assert answer.failure.is_general


@pytest.mark.parametrize("name, version, line", lines_of("met"))
def test_what_a_dry_load_met_is_known(name, version, line):
    kinds = ("dry_load", "defects", "failures")
    of = version.partition(",")[0].removeprefix("any")
    found = known_failure(line, kinds=kinds, version=of)
    assert found is not None and found[0].name == name


@pytest.mark.parametrize("row", SAID["silent"], ids=lambda row: row["name"])
def test_what_a_dry_load_saw_in_silence_is_known(row):
    silence = Silence.model_validate(row["silence"])
    version = row.get("version", "0.32.0")
    found = silent_defect(silence, family=row["family"], version=version)
    assert found is not None and found.name == row["name"]


@pytest.mark.parametrize("row", SAID["good"], ids=lambda row: row["line"][:20])
def test_what_is_no_such_failure_is_not_called_one(row):
    assert all(known_failure(line) is None for line in parse_log(row["line"].encode()).lines)


def test_every_row_has_words_from_somewhere_and_rules_that_exist():
    quoted = {*SAID["said"], *SAID["met"]}
    quoted |= {row["name"] for kind in ("raised", "silent") for row in SAID[kind]}
    assert {row.name for row in ROWS} == quoted and len(quoted) == len(ROWS)
    assert all((row.says, row.cure, row.versions, row.sources) for row in ROWS)
    sources = (Path(__file__).parents[3] / "validate").rglob("*.py")
    rules = {*re.findall(r'"([a-z-]+)"', "".join(path.read_text() for path in sources))}
    assert {rule for row in ROWS for rule in row.rules} <= rules


@pytest.mark.parametrize(
    "family, version, says",
    [
        (
            "step3p5",
            "0.31.0",
            "it cuts layer_types to the decoder layers, then looks up the draft's layer behind them",
        ),
        (
            "step3p5",
            "0.32.0+cpu",
            "it cuts layer_types to the decoder layers, then looks up the draft's layer behind them",
        ),
        ("glm4_moe", "0.32.0", ""),
        ("step3p5", "0.33.0rc1.dev9", "it looks up the heads"),
        ("step3p5", "0.34.0", ""),
    ],
)
def test_a_defect_is_of_its_families_and_of_its_versions(family, version, says):
    place = "vllm/models/step3p5.py:421"
    failure = LoadFailure(stage="load", role="draft", type="IndexError", words="", at=place)
    defect = known_defect(failure, family=family, dialect="", version=version)
    assert (defect is not None) == bool(says)
    if defect:
        assert defect.says.startswith(f"a defect of vLLM {version}, not of the checkpoint: {says}")
        assert defect.cure.endswith("helps; vLLM 0.33.0 does not have it") == says.startswith(
            "it cuts"
        )


# --- logs -----------------------------------------------------------------------------------------


def test_workers_repeat_a_traceback_and_it_is_told_once():
    lines = "".join(
        f"(Worker_TP{rank} pid={rank}) ERROR 02-27 16:21:24 [multiproc_executor.py:796] {line}"
        for rank in range(8)
        for line in (FRAME.format("glm4_moe_mtp.py", 405), f"{MISSING.decode()}\n")
    )
    found = told(lines.encode())
    (answer,) = found.answers
    assert answer.failure.name == "MTP weights dropped" and not found.unknown
    assert answer.command[:2] == ("graft", "PATH")


def test_a_log_with_its_checkpoint_names_the_tensor_and_the_finding(tmp_path):
    checkpoint = ours("glm-4.7", "NVFP4")
    raised = FRAME.format("m.py", 1) + "KeyError: 'layers.3.mlp.experts.w13_weight'\n"
    (answer,) = told(raised.encode(), checked(checkpoint, tmp_path / "whole")).answers
    assert answer.on_disk == "model.layers.3.mlp.experts.0.down_proj.weight"
    assert answer.confirmed == ()
    checkpoint.take(r"model\.layers\.3\..*")
    (answer,) = told(MISSING, checked(checkpoint, tmp_path / "lost")).answers
    assert any("layers.3" in found for found in answer.confirmed)


def test_a_good_checkpoint_has_the_defects_of_its_dialect_first(tmp_path):
    """vllm #55496: before 0.30 modelopt's experts in FP8 blocks were built plain."""
    log = b"AttributeError: Layer mtp.layers.9.mlp.experts has no parameter 'w2_weight_scale_inv' for "
    log += b"checkpoint weight 'mtp.layers.9.mlp.experts.0.down_proj.weight_scale_inv'"
    good = block_experts()
    for made, name in (
        (good, "experts in FP8 blocks under modelopt"),
        (released("deepseek-r1"), "experts built in another form"),
        (silent(), "experts built in another form"),
    ):
        (answer,) = told(log, checked(made, tmp_path / made.config["model_type"])).answers
        assert answer.failure.name == name
    runtime = RuntimeView.of(as_source(good, tmp_path / "0.29"), "0.29.0")
    cures = [each.finding.cure for each in stored_form_is_what_is_built(runtime)]
    assert cures and all("a newer vLLM, if one has FP8_PB_WO for experts" in cure for cure in cures)


@pytest.mark.parametrize("row", SAID["unknown"], ids=lambda row: row["log"][:20])
def test_what_nobody_knows_is_unknown(row):
    found = told(row["log"].encode())
    assert not found.is_explained and found.answers == () and [*found.unknown] == row["unknown"]


def test_only_the_end_of_a_long_log_counts(tmp_path):
    class Long:
        """16 MiB of noise, then the failure."""

        left = 16

        def read1(self, size: int) -> bytes:
            self.left -= 1
            if self.left > 0:
                return b"noise\n" * (size // 6)
            if self.left == 0:
                return MISSING
            return b""

    assert MOST_BYTES == 8 << 20
    assert explain(None, read_log(Long())).is_explained  # type: ignore[arg-type]
    with (log := tmp_path / "serve.log").open("wb") as file:
        file.truncate(1 << 40)  # a hole: no room on the disk
        file.seek(0, os.SEEK_END)
        file.write(b"\n" + MISSING)
    assert b"known: MTP weights dropped" in keepmtp("--log", str(log)).stdout


def test_a_log_of_many_errors_costs_seconds_and_the_last_ones_count():
    noise = "".join(f"KeyError: 'layers.{n}.no.such'\nFooError: {n}\n" for n in range(100_000))
    began = time.process_time()
    found = told(noise.encode() + MISSING)
    assert time.process_time() - began < 5  # 2 s on a core; 9 s when each exception was judged
    assert "MTP weights dropped" in [answer.failure.name for answer in found.answers]
    assert found.unknown[-1] == "FooError: 99999"


@pytest.mark.parametrize("unit", SAID["units"])
def test_no_line_makes_the_table_slow(unit):
    """8 MiB of it in one line, and as lines."""
    began = time.process_time()
    for raw in ((unit * (8 << 20))[: 8 << 20], (unit * 40 + "Error\n") * 4000):
        for line in parse_log(raw.encode()).lines:
            known_failure(line)
    assert time.process_time() - began < 5


def test_a_pipe_that_stays_open_ends_with_ctrl_c():
    words = [KEEPMTP, "explain", "--log", "-"]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe) as running:
        assert running.stdin and running.stdout and running.stderr
        running.stdin.write(MISSING + b"\n")
        running.stdin.flush()
        while any(fcntl.ioctl(running.stdin.fileno(), termios.FIONREAD, b"\0" * 4)):
            time.sleep(0.05)
        running.send_signal(signal.SIGINT)
        assert b"known: MTP weights dropped" in running.stdout.read(), running.stderr.read()


def test_bytes_of_a_stranger_are_not_printed_as_they_came():
    hostile = b"KeyError: 'layers.0.\x1b]0;title\x07mlp.experts.w13_weight'\n\xff\xfe\x00"
    found = told(hostile)
    assert "\x1b" not in found.model_dump_json() and "\x07" not in "".join(found.unknown)


# --- the command ----------------------------------------------------------------------------------


def test_an_unknown_failure_has_exit_status_1(tmp_path):
    log = tmp_path / "serve.log"
    log.write_bytes(b"FooError: nobody knows\n")
    done = keepmtp("--log", str(log))
    assert done.returncode == 1 and b"unknown: FooError: nobody knows" in done.stdout
    assert json.loads(keepmtp("--log", str(log), "--json").stdout)["answers"] == []


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "words, says",
    [
        ([], "needs a checkpoint, a log, or both"),
        (["--log", "/dev/zero"], "--log: must be a file, or - for standard input; got /dev/zero"),
        (["--log", "{tmp}/pipe"], "must be a file"),
        (["--log", "-", "--gpu", "sm100"], "--gpu loads a checkpoint"),
        (["--log", "/no/such/log"], "/no/such/log"),
        (["/no/such/folder"], "/no/such/folder"),
        (["{tmp}/cut"], "model-1.safetensors"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(words, says, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    folder = write(tmp_path / "cut", ours("glm-4.7", "NVFP4"))
    (folder / "model-1.safetensors").write_bytes(b"")
    refused("explain", *(word.format(tmp=tmp_path) for word in words), says=says)
