"""`keepmtp explain`: groups of modules, logs, and the two together, as people use it."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from checkpoint_files import Checkpoint, as_source, write
from good import llmcompressor, ours, released
from keepmtp.cli import main
from keepmtp.recipes.families import find_view
from keepmtp.validate.check.check import Checked, check_source
from keepmtp.validate.check.runtime_view import RuntimeView
from keepmtp.validate.dryload.explain import BuiltGroup, Explanation, explain, groups_of
from keepmtp.validate.dryload.failures import known
from keepmtp.validate.dryload.log import MOST_BYTES, parse_log, read_log
from modelopt_form import mixed, modelopt

KEEPMTP = str(Path(sys.executable).with_name("keepmtp"))
MISSING = (
    b"ValueError: MTP speculative decoding layer 3 weights missing from checkpoint. The "
    b"checkpoint may have"
)
FRAME = '  File "/usr/local/lib/python3.12/dist-packages/vllm/{}", line {}, in load_weights\n'


def keepmtp(*words: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([KEEPMTP, "explain", *words], input=stdin, capture_output=True)


def checked(checkpoint: Checkpoint, tmp_path: Path) -> Checked:
    source = as_source(checkpoint, tmp_path)
    runtime = RuntimeView(source=source, view=find_view(source.config, source.where))
    return Checked(check_source(source), source, runtime)


def groups(checkpoint: Checkpoint, tmp_path: Path) -> dict[tuple[str, str], BuiltGroup]:
    return {
        (group.part, group.modules): group
        for group in groups_of(checked(checkpoint, tmp_path).runtime)
    }


@pytest.fixture(scope="module")
def silent(tmp_path_factory) -> Path:
    """A BF16 MTP layer that the FP8 group claims."""
    checkpoint = llmcompressor("glm-4.7", "FP8_DYNAMIC")
    checkpoint.quantization["ignore"] = [
        e for e in checkpoint.quantization["ignore"] if "layers.3" not in e
    ]
    return write(tmp_path_factory.mktemp("silent") / "glm", checkpoint)


# --- Groups ---------------------------------------------------------------------------------------


def test_each_group_has_its_form_its_files_and_the_entry_that_decides(tmp_path):
    checkpoint = llmcompressor("glm-4.7", "FP8_DYNAMIC")
    found = groups(checkpoint, tmp_path)
    experts = found["backbone", "routed experts"]
    assert (experts.built, experts.stored, experts.why) == (
        "FP8 by channel",
        "FP8 by channel",
        "targets has Linear",
    )
    assert (
        experts.count == 2
        and experts.tensors == 2 * 4 * 3 * 2
        and experts.first_file == "model.safetensors"
    )
    glue = found["mtp", "glue"]
    assert (glue.built, glue.stored) == (
        "plain",
        "BF16",
    ) and "without the quantization config" in glue.why
    attention = found["mtp", "attention"]
    assert attention.built == "plain" and attention.why.startswith("ignore has ")


@pytest.mark.parametrize(
    ("make", "part", "modules", "built", "why"),
    [
        (
            lambda: released("glm-4.7"),
            "mtp",
            "attention",
            "plain",
            "there is no quantization config",
        ),
        (
            lambda: released("deepseek-r1"),
            "mtp",
            "routed experts",
            "FP8 in blocks",
            "quant_method is fp8, and no entry",
        ),
        (lambda: released("deepseek-r1"), "backbone", "head", "plain", "never quantizes a head"),
        (
            lambda: modelopt("glm-4.7", "NVFP4", "bf16"),
            "backbone",
            "attention",
            "NVFP4",
            "quant_algo is NVFP4",
        ),
        (
            lambda: mixed("glm-4.7", "FP8"),
            "backbone",
            "attention",
            "FP8, a scale",
            "and 5 more for the others",
        ),
        (lambda: ours("glm-4.7", "W4A16"), "backbone", "routed experts", "INT4", "targets has "),
    ],
)
def test_each_dialect_says_why(make, part, modules, built, why, tmp_path):
    group = groups(make(), tmp_path)[part, modules]
    assert group.built == built and why in group.why


def test_modules_that_differ_are_groups_of_their_own(tmp_path):
    checkpoint = llmcompressor("glm-4.7", "FP8_DYNAMIC")
    checkpoint.quantization["ignore"].append("model.layers.1.mlp.shared_experts.down_proj")
    found = groups_of(checked(checkpoint, tmp_path).runtime)
    kept = [
        group
        for group in found
        if group.why == "ignore has model.layers.1.mlp.shared_experts.down_proj"
    ]
    assert [(group.modules, group.count, group.built, group.stored) for group in kept] == [
        ("shared experts", 1, "plain", "FP8 by channel")
    ]


def test_an_entry_that_vllm_reads_under_another_name(tmp_path):
    checkpoint = llmcompressor("qwen3.5-397b", "FP8_DYNAMIC")
    name = "model.language_model.layers.3.self_attn.o_proj"
    checkpoint.quantization["ignore"].append(name)
    found = groups_of(checked(checkpoint, tmp_path).runtime)
    assert any(
        group.why.startswith(f"ignore has {name} (vLLM reads language_model.model.")
        for group in found
    )


def test_an_fp8_cache_is_a_sentence(tmp_path):
    checkpoint = ours("glm-4.7", "NVFP4")
    checkpoint.quantization["kv_cache_scheme"] = {"type": "float", "num_bits": 8}
    assert explain(checked(checkpoint, tmp_path), None).notes == (
        (
            "The KV cache of target and draft is float with 8 bits, unless --kv-cache-dtype says "
            "otherwise."
        ),
    )


def test_the_commands_that_cure_can_be_typed():
    for command in {row.command for rows in known().values() for row in rows if row.command}:
        verb, *words = command.split()
        options = {name for option in main._load(verb).params for name in option.opts}
        assert {word for word in words if word.startswith("-")} <= options, command


# --- Logs -----------------------------------------------------------------------------------------


def test_workers_repeat_a_traceback_and_it_is_told_once(tmp_path):
    lines = "".join(
        f"(Worker_TP{rank} pid={rank}) ERROR 02-27 16:21:24 [multiproc_executor.py:796] {line}"
        for rank in range(8)
        for line in (
            FRAME.format("model_executor/models/glm4_moe_mtp.py", 405),
            f"{MISSING.decode()}\n",
        )
    )
    told = explain(None, parse_log(lines.encode()))
    (answer,) = told.answers
    assert answer.failure.name == "MTP weights dropped" and told.is_explained and not told.unknown
    assert answer.command[:2] == ("graft", "PATH")


def test_a_log_with_its_checkpoint_names_the_tensor_and_the_finding(silent, tmp_path):
    checkpoint = ours("glm-4.7", "NVFP4")
    lost = {name for name in checkpoint.tensors if name.startswith("model.layers.3.")}
    checkpoint.tensors = {
        name: spec for name, spec in checkpoint.tensors.items() if name not in lost
    }
    (answer,) = explain(checked(checkpoint, tmp_path), parse_log(MISSING)).answers
    assert any(
        "layers.3" in found or "num_nextn_predict_layers" in found for found in answer.confirmed
    )
    raised = (
        FRAME.format("model_executor/models/glm4_moe_mtp.py", 1)
        + "KeyError: 'layers.3.mlp.experts.w13_weight'\n"
    )
    (answer,) = explain(
        checked(ours("glm-4.7", "NVFP4"), tmp_path), parse_log(raised.encode())
    ).answers
    assert (
        answer.on_disk == "model.layers.3.mlp.experts.0.down_proj.weight" and answer.confirmed == ()
    )


def test_a_defect_of_vllm_is_called_one(tmp_path):
    raised = (
        FRAME.format("model_executor/models/step3p5.py", 421)
        + "IndexError: list index out of range\n"
    )
    (answer,) = explain(None, parse_log(raised.encode())).answers
    assert (
        answer.failure.says.startswith("a defect of vLLM 0.32.0")
        and "layer_types" in answer.failure.says
    )


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
    told = explain(None, parse_log(log))
    assert not told.is_explained and told.answers == () and told.unknown == unknown


def test_only_the_end_of_a_long_log_counts(tmp_path):
    class Endless:
        """16 MiB of noise, then the failure."""

        left = 16

        def read1(self, size: int) -> bytes:
            self.left -= 1
            return b"noise\n" * (size // 6) if self.left > 0 else MISSING if self.left == 0 else b""

    log = read_log(Endless())  # type: ignore[arg-type]
    assert MOST_BYTES == 8 << 20 and explain(None, log).is_explained


def test_a_log_of_many_errors_costs_seconds_and_the_last_ones_count():
    noise = "".join(
        f"KeyError: 'layers.{number}.no.such'\nFooError: {number}\n" for number in range(100_000)
    )
    began = time.process_time()
    told = explain(None, parse_log(noise.encode() + MISSING))
    assert time.process_time() - began < 5  # 2 s on a core; 9 s when each exception was judged
    assert "MTP weights dropped" in [answer.failure.name for answer in told.answers]
    assert told.unknown[-1] == "FooError: 99999"


def test_a_pipe_with_a_name_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "log")
    done = keepmtp("--log", str(tmp_path / "log"))
    assert done.returncode == 2 and b"must be a file" in done.stderr


def test_a_pipe_without_an_end_is_refused():
    with Path("/dev/zero").open("rb") as endless:
        done = subprocess.run(
            [KEEPMTP, "explain", "--log", "-"], stdin=endless, capture_output=True
        )
    assert (
        done.returncode == 2
        and b"--log: must have an end; got more than 1 GiB. Pipe its last part" in done.stderr
    )


def test_a_pipe_that_stays_open_ends_with_ctrl_c():
    words = [KEEPMTP, "explain", "--log", "-"]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as running:
        assert running.stdin and running.stdout and running.stderr
        running.stdin.write(MISSING + b"\n")
        running.stdin.flush()
        while unread(running.stdin.fileno()):
            time.sleep(0.05)
        running.send_signal(signal.SIGINT)
        assert b"known: MTP weights dropped" in running.stdout.read(), running.stderr.read()


def unread(pipe: int) -> int:
    """Bytes that nobody has read from a pipe yet."""
    left = fcntl.ioctl(pipe, termios.FIONREAD, b"\0" * 4)
    return int.from_bytes(left, sys.byteorder)


def test_of_a_long_file_only_the_end_is_read(tmp_path):
    with (log := tmp_path / "serve.log").open("wb") as file:
        file.truncate(1 << 40)  # a hole: no room on the disk
        file.seek(0, os.SEEK_END)
        file.write(b"\n" + MISSING)
    done = keepmtp("--log", str(log))
    assert done.returncode == 0 and b"known: MTP weights dropped" in done.stdout


def test_general_words_say_that_they_are(silent):
    line = b"KeyError: 'model.layers.3.mlp.shared_expert.no_proj.weight'\n"
    done = keepmtp(str(silent), "--log", "-", stdin=line)
    assert b"What it often is" in done.stdout and b"this is general" in done.stdout
    done = keepmtp(
        "--log", "-", stdin=b"Weight files referenced in index but missing: RuntimeError\n"
    )
    assert b"this is general" not in done.stdout


def test_a_logs_version():
    banner = (
        "(APIServer pid=1) INFO 05-09 00:05:01 [api_utils.py:339]        █▄█▀ █     █     █     "
        "█  version 0.25.1"
    )
    assert parse_log(banner.encode()).version == "0.25.1"
    assert (
        parse_log(b"INFO Initializing a V1 LLM engine (v0.19.1) with config: model='x'").version
        == "0.19.1"
    )


def test_bytes_of_a_stranger_are_not_printed_as_they_came():
    hostile = b"KeyError: 'layers.0.\x1b]0;title\x07mlp.experts.w13_weight'\n\xff\xfe\x00"
    told = explain(None, parse_log(hostile))
    assert "\x1b" not in told.model_dump_json() and "\x07" not in "".join(told.unknown)


# --- The command ----------------------------------------------------------------------------------


def test_the_command_for_people_and_machines(silent):
    done = keepmtp(str(silent), "--log", "-", stdin=b"Avg Draft acceptance rate: 0.2%\n")
    out = done.stdout.decode()
    assert done.returncode == 0, done.stderr
    for words in (
        "vLLM's target",
        "vLLM's draft",
        "targets has Linear",
        "known: draft accepted at 0 %",
        "--values",
    ):
        assert words in out
    assert "In this checkpoint: model.layers.3." in out
    told = Explanation.model_validate_json(keepmtp(str(silent), "--json").stdout)
    assert (
        told.family == "glm4_moe"
        and told.log_lines is None
        and {group.part for group in told.groups} == {"backbone", "mtp"}
    )


def test_an_unknown_failure_has_exit_status_1(tmp_path):
    log = tmp_path / "serve.log"
    log.write_bytes(b"FooError: nobody knows\n")
    done = keepmtp("--log", str(log))
    assert done.returncode == 1 and b"unknown: FooError: nobody knows" in done.stdout
    assert json.loads(keepmtp("--log", str(log), "--json").stdout)["answers"] == []


def test_a_checkpoint_that_cannot_be_read_is_refused(tmp_path):
    folder = write(tmp_path / "cut", ours("glm-4.7", "NVFP4"))
    (folder / "model-1.safetensors").write_bytes(b"")
    done = keepmtp(str(folder))
    assert done.returncode == 2 and b"model-1.safetensors" in done.stderr and not done.stdout


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), b"needs a checkpoint, a log, or both"),
        (
            ("--log", "/dev/zero"),
            b"--log: must be a file, or - for standard input; got /dev/zero. Name the file",
        ),
        (("--log", "-", "--gpu", "sm100"), b"--gpu loads a checkpoint"),
        (("--log", "/no/such/log"), b"/no/such/log"),
        (("/no/such/folder",), b"/no/such/folder"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(words, says):
    done = keepmtp(*words)
    assert done.returncode == 2 and done.stderr.startswith(b"error: ") and says in done.stderr
    assert b"Traceback" not in done.stderr
