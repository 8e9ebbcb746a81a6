"""`keepmtp explain`: groups of modules, logs, and the two together, as people use it; and that each
known failure is found by the text that its public thread quotes.
"""

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import termios
import time
import tomllib
from pathlib import Path

import pytest
from checkpoint_files import Checkpoint, as_source, write
from good import llmcompressor, ours, released
from keepmtp.cli import main
from keepmtp.recipes.families import find_view
from keepmtp.validate.check.check import Checked, check_source
from keepmtp.validate.check.runtime_view import RuntimeView
from keepmtp.validate.dryload.explain import BuiltGroup, Explanation, explain, groups_of
from keepmtp.validate.dryload.failures import known, known_defect, known_failure
from keepmtp.validate.dryload.log import MOST_BYTES, parse_log, read_log
from keepmtp.validate.facts.dry_load import LoadFailure
from modelopt_form import mixed, modelopt

KEEPMTP = str(Path(sys.executable).with_name("keepmtp"))
MISSING = b"ValueError: MTP speculative decoding layer 3 weights missing from checkpoint. The"
FRAME = '  File "/usr/local/lib/python3.12/dist-packages/vllm/{}", line {}, in load_weights\n'
ROWS = [row for rows in known().values() for row in rows]
SAID = tomllib.loads((Path(__file__).parent / "said.toml").read_text())


def keepmtp(*words: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([KEEPMTP, "explain", *words], input=stdin, capture_output=True)


def told(log: bytes, checked: Checked | None = None) -> Explanation:
    return explain(checked, parse_log(log))


def checked(checkpoint: Checkpoint, tmp_path: Path) -> Checked:
    source = as_source(checkpoint, tmp_path)
    runtime = RuntimeView(source=source, view=find_view(source.config, source.where))
    return Checked(check_source(source), source, runtime)


def groups(checkpoint: Checkpoint, tmp_path: Path) -> tuple[BuiltGroup, ...]:
    return groups_of(checked(checkpoint, tmp_path).runtime)


@pytest.fixture(scope="module")
def silent(tmp_path_factory) -> Path:
    """A BF16 MTP layer that the FP8 group claims."""
    checkpoint = llmcompressor("glm-4.7", "FP8_DYNAMIC")
    listed = checkpoint.quantization["ignore"]
    checkpoint.quantization["ignore"] = [name for name in listed if "layers.3" not in name]
    return write(tmp_path_factory.mktemp("silent") / "glm", checkpoint)


# --- groups ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "part", "modules", "built", "why"),
    [
        (
            lambda: llmcompressor("glm-4.7", "FP8_DYNAMIC"),
            "backbone",
            "experts",
            "fp8_channel",
            "targets has Linear",
        ),
        (
            lambda: llmcompressor("glm-4.7", "FP8_DYNAMIC"),
            "mtp",
            "glue",
            "plain",
            "without the quantization config",
        ),
        (lambda: released("glm-4.7"), "mtp", "attention", "plain", "no quantization config"),
        (lambda: released("deepseek-r1"), "mtp", "experts", "fp8_block", "fp8 decides it"),
        (
            lambda: modelopt("glm-4.7", "NVFP4", "bf16"),
            "backbone",
            "attention",
            "nvfp4",
            "modelopt decides",
        ),
        (lambda: mixed("glm-4.7", "FP8"), "backbone", "attention", "fp8_tensor", "and 5 more"),
        (lambda: ours("glm-4.7", "W4A16"), "backbone", "experts", "int4", "targets has "),
    ],
)
def test_each_group_has_its_form_and_the_entry_that_decides(
    make, part, modules, built, why, tmp_path
):
    found = {(group.part, group.modules): group for group in groups(make(), tmp_path)}
    group = found[part, modules]
    assert group.built.startswith(built) and why in group.why
    if why == "targets has Linear":
        assert (group.count, group.tensors, group.stored) == (2, 2 * 4 * 3 * 2, "fp8_channel")


def test_modules_that_differ_are_groups_of_their_own(tmp_path):
    checkpoint = llmcompressor("qwen3.5-397b", "FP8_DYNAMIC")
    name = "model.language_model.layers.3.self_attn.o_proj"
    checkpoint.quantization["ignore"].append(name)
    why = f"ignore has {name} (vLLM reads language_model.model."
    (kept,) = [each for each in groups(checkpoint, tmp_path) if each.why.startswith(why)]
    found = (kept.modules, kept.count, kept.built, kept.stored)
    assert found == ("attention", 1, "plain", "fp8_channel")


def test_the_commands_that_cure_can_be_typed():
    for command in {row.command for row in ROWS if row.command}:
        verb, *words = command.split()
        options = {name for option in main._load(verb).params for name in option.opts}
        assert {word for word in words if word.startswith("-")} <= options, command


# --- known failures -------------------------------------------------------------------------------


@pytest.mark.parametrize("row", SAID["said"], ids=lambda row: f"{row['name']}: {row['origin']}")
def test_the_words_of_a_thread_name_the_failure(row):
    (line,) = parse_log(row["line"].encode()).lines
    found = known_failure(line)
    assert found is not None and found[0].name == row["name"]


@pytest.mark.parametrize("row", SAID["raised"], ids=lambda row: row["origin"])
def test_the_place_of_an_exception_tells_a_defect_from_a_fault(row):
    (answer,) = told(f"{row['frame']}\n{row['line']}\n".encode()).answers
    assert answer.failure.name == row["name"] and not answer.failure.is_general
    (answer,) = told(row["line"].encode()).answers
    assert answer.failure.is_general


@pytest.mark.parametrize("row", SAID["met"], ids=lambda row: row["name"])
def test_what_a_dry_load_met_is_known(row):
    found = known_failure(row["line"], kinds=("dry_load", "defects", "failures"))
    assert found is not None and found[0].name == row["name"]


@pytest.mark.parametrize("row", SAID["good"], ids=lambda row: row["line"][:20])
def test_what_is_no_such_failure_is_not_called_one(row):
    assert all(known_failure(line) is None for line in parse_log(row["line"].encode()).lines)


def test_every_row_has_words_from_somewhere_and_rules_that_exist():
    quoted = {row["name"] for kind in ("said", "raised", "met") for row in SAID[kind]}
    assert {row.name for row in ROWS} == quoted and len(quoted) == len(ROWS)
    assert all((row.says, row.cure, row.concerns, row.sources) for row in ROWS)
    sources = (Path(__file__).parents[3] / "validate").rglob("*.py")
    rules = {*re.findall(r'"([a-z-]+)"', "".join(path.read_text() for path in sources))}
    assert {rule for row in ROWS for rule in row.rules} <= rules


def test_a_defect_is_of_its_families_and_of_its_release():
    place = "vllm/models/step3p5.py:421"
    failure = LoadFailure(stage="load", role="draft", type="IndexError", words="", at=place)
    for family, version in (("step3p5", "0.32.0"), ("glm4_moe", "0.32.0"), ("step3p5", "0.33.0")):
        is_one = (family, version) == ("step3p5", "0.32.0")
        assert (known_defect(failure, family=family, version=version) is not None) == is_one


def test_what_sglang_raises_is_not_told_of_vllm():
    """sglang #3075; without the frame the words are general."""
    line = "KeyError: 'model.layers.3.mlp.experts.w2_weight_scale_inv'"
    frame = '  File "site-packages/sglang/srt/models/deepseek_v2.py", line 920, in load_weights'
    found = told(f"{frame}\n{line}\n".encode())
    assert found.answers == ()
    assert found.unknown == (f"{line} (sglang/srt/models/deepseek_v2.py:920)",)
    assert told(line.encode()).is_explained


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


@pytest.mark.parametrize(
    ("log", "unknown"),
    [
        (b"", ()),
        (b"INFO 02-27 16:21:24 [api_server.py:1] all is well\n", ()),
        (b"KeyError: 'no such thing'\n", ("KeyError: 'no such thing'",)),
        (b"RuntimeError: Engine core initialization failed. See root cause above.\n", ()),
    ],
)
def test_what_nobody_knows_is_unknown(log, unknown):
    found = told(log)
    assert not found.is_explained and found.answers == () and found.unknown == unknown


def test_only_the_end_of_a_long_log_counts(tmp_path):
    class Long:
        """16 MiB of noise, then the failure."""

        left = 16

        def read1(self, size: int) -> bytes:
            self.left -= 1
            return b"noise\n" * (size // 6) if self.left > 0 else MISSING if self.left == 0 else b""

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


@pytest.mark.parametrize(
    "unit",
    [
        "a",
        "mtp.",
        "layers.0.",
        "KeyError: '",
        "experts.w2_weight",
        "[",
        'File "',
        "ERROR 02-27 16:21:24 [x] ",
        "\x1b[1",
        "Following weights were not initialized from checkpoint: model.layers.16.",
    ],
)
def test_no_line_makes_the_table_slow(unit):
    """8 MiB of it in one line, and as lines."""
    began = time.process_time()
    for raw in ((unit * (8 << 20))[: 8 << 20], (unit * 40 + "Error\n") * 4000):
        for line in parse_log(raw.encode()).lines:
            known_failure(line)
    assert time.process_time() - began < 5


def test_a_pipe_that_stays_open_ends_with_ctrl_c():
    words, pipe = [KEEPMTP, "explain", "--log", "-"], subprocess.PIPE
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


def test_the_command_for_people_and_machines(silent):
    done = keepmtp(str(silent), "--log", "-", stdin=b"Avg Draft acceptance rate: 0.2%\n")
    assert done.returncode == 0, done.stderr
    parts = ("vLLM's target", "vLLM's draft", "targets has Linear", "draft accepted at 0 %")
    for words in (*parts, "--values", "In this checkpoint: model.layers.3."):
        assert words in done.stdout.decode()
    found = Explanation.model_validate_json(keepmtp(str(silent), "--json").stdout)
    assert found.family == "glm4_moe" and found.log_lines is None
    line = b"KeyError: 'model.layers.3.mlp.shared_expert.no_proj.weight'\n"
    done = keepmtp(str(silent), "--log", "-", stdin=line)
    assert b"What it often is" in done.stdout and b"this is general" in done.stdout


def test_an_unknown_failure_has_exit_status_1(tmp_path):
    log = tmp_path / "serve.log"
    log.write_bytes(b"FooError: nobody knows\n")
    done = keepmtp("--log", str(log))
    assert done.returncode == 1 and b"unknown: FooError: nobody knows" in done.stdout
    assert json.loads(keepmtp("--log", str(log), "--json").stdout)["answers"] == []


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "needs a checkpoint, a log, or both"),
        (("--log", "/dev/zero"), "--log: must be a file, or - for standard input; got /dev/zero"),
        (("--log", "{tmp}/pipe"), "must be a file"),
        (("--log", "-", "--gpu", "sm100"), "--gpu loads a checkpoint"),
        (("--log", "/no/such/log"), "/no/such/log"),
        (("/no/such/folder",), "/no/such/folder"),
        (("{tmp}/cut",), "model-1.safetensors"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(words, says, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    folder = write(tmp_path / "cut", ours("glm-4.7", "NVFP4"))
    (folder / "model-1.safetensors").write_bytes(b"")
    done = keepmtp(*(word.format(tmp=tmp_path) for word in words))
    assert done.returncode == 2 and done.stderr.startswith(b"error: ") and not done.stdout
    assert says in done.stderr.decode() and b"Traceback" not in done.stderr
