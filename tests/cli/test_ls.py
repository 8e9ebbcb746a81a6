"""`keepmtp ls`: one screen of models, one model in full, and the listings."""

import fcntl
import json
import os
import pty
import struct
import subprocess
import termios

import pytest
from commands import KEEPMTP, assert_shows, environment_without, ran
from keepmtp.cli.ls import COLUMNS, screen
from keepmtp.recipes.model_file import listed

MODELS = {row["model"] for row in listed()}


def on_a_terminal(*words: str, columns: int) -> str:
    """What the command prints on a terminal of that width."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    env = environment_without("COLUMNS", "LINES")
    running = subprocess.Popen([KEEPMTP, *words], stdin=slave, stdout=slave, stderr=slave, env=env)
    os.close(slave)
    told = b""
    while True:
        try:
            told += os.read(master, 1 << 16)
        except OSError:  # Linux's word for the end of a terminal
            break
    os.close(master)
    assert running.wait() == 0, told
    return told.decode().replace("\r\n", "\n")


@pytest.mark.parametrize("width", [40, 80, 132])
def test_one_line_a_model_in_the_width_there_is(width):
    lines = screen(listed(), width)
    assert max(map(len, lines)) <= width
    assert {line.split()[0] for line in lines[1:] if line[:1].strip()} >= MODELS
    names = " ".join(lines).split()
    assert all(row["variant"] + "*" * row["default"] in names for row in listed())


def test_the_screen_is_the_same_in_a_pipe_and_on_a_terminal():
    assert ran("ls", COLUMNS="") == ran("ls", COLUMNS="80") == on_a_terminal("ls", columns=80)


def test_what_is_asked_for_by_name_is_said_whole():
    """A model, one of its recipes, the schemes."""
    assert_shows(
        ran("ls tiny-glm4-moe", COLUMNS="200"),
        "models (default: what the bare model name means), family glm4_moe, source "
        "models/tiny-glm4-moe",
        "tiny-glm4-moe.w4a16-fp8 * - W4A16 experts, FP8_BLOCK elsewhere, MTP block BF16; no",
        "tiny-glm4-moe.fp8-kv needed FP8, MTP block BF16, FP8 KV cache",
    )
    said = ran("ls mimo-7b.w4a16", COLUMNS="200")
    assert_shows(said, "mimo-7b.w4a16 - W4A16, MTP block BF16; no calibration")
    assert "mimo-7b.nvfp4" not in said
    assert_shows(
        ran("ls schemes", COLUMNS="200"),
        "schemes (bits: per weight, on disk)",
        "NVFP4 4.50 needed 4-bit floats, FP8 scale per 16, activations 4-bit with a calibrated "
        "global scale. Runs on sm100, sm120; from sm80 with 16-bit activations.",
        "W8A8 8.00 - 8-bit integers, scale a row, activations per token on the fly. Runs on sm75",
    )
    (only,) = json.loads(ran("ls mimo-7b.w4a16 --json"))["models"]
    assert (only["model"], only["variant"], only["default"]) == ("mimo-7b", "w4a16", False)


def test_families_say_what_can_be_calibrated_and_why_not():
    found = {row["family"]: row for row in json.loads(ran("ls families --json"))["families"]}

    def can(family: str) -> str:
        return " ".join(found[family][column] for column in COLUMNS["families"][1:])

    assert can("glm4_moe") == "yes yes vllm" and can("bailing_hybrid") == "no no -"
    assert "no class for model_type 'bailing_hybrid'" in found["bailing_hybrid"]["why_not_backbone"]
    # transformers builds this backbone, but its MTP block cannot be run.
    assert can("glm5_next").startswith("yes no ")
    shown = ran("ls families", COLUMNS="80")
    assert max(map(len, shown.splitlines()[:-1])) <= 80 and "can be calibrated" in shown
