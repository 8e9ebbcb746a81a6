"""`keepmtp ls`: one screen of models, one model in full, and the listings."""

import fcntl
import json
import os
import pty
import struct
import subprocess
import termios

import pytest
from commands import KEEPMTP, keepmtp
from keepmtp.cli.ls import COLUMNS, details, rows, screen
from keepmtp.recipes.find import find_recipe
from keepmtp.recipes.model_file import listed

MODELS = {row.model for row in listed()}


def on_a_terminal(*words: str, columns: int) -> list[str]:
    """The lines that the command prints on a terminal of that width."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
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
    return told.decode().splitlines()


@pytest.mark.parametrize("width", [40, 80, 132])
def test_one_line_a_model_in_the_width_there_is(width):
    lines = screen(listed(), width)
    assert max(map(len, lines)) <= width
    assert {line.split()[0] for line in lines[1:] if line[:1].strip()} >= MODELS
    names = " ".join(lines).split()
    assert all(row.variant + "*" * row.is_default in names for row in listed())


def test_the_screen_fits_80_columns_in_a_pipe_and_on_a_terminal():
    piped = keepmtp("ls", COLUMNS="").stdout.splitlines()
    assert (
        piped == keepmtp("ls", COLUMNS="80").stdout.splitlines() == on_a_terminal("ls", columns=80)
    )
    assert max(map(len, piped)) <= 80 and len(piped) < 1.6 * len(MODELS)
    assert "\x1b" not in "".join(piped)
    assert next(line for line in piped if line.startswith("glm-4.7 ")).split()[1] == "nvfp4a16-fp8*"


@pytest.mark.parametrize("model", sorted(MODELS))
def test_a_model_in_full(model):
    variants = [row for row in listed() if row.model == model]
    lines = details(variants, 80)
    assert max(map(len, lines)) <= 80
    told = " ".join(" ".join(lines).split())
    assert variants[0].family in told and variants[0].source in told
    assert all(" ".join(row.summary.split()) in told for row in variants)
    assert told.count("no batches needed") == sum(not row.needs_batches for row in variants)
    assert told.count(": batches needed") == sum(row.needs_batches for row in variants)
    commands = [line.split()[-1] for line in lines if line.startswith("  keepmtp quantize ")]
    assert [find_recipe(word)[0].name for word in commands] == [row.name for row in variants]


def test_a_model_or_one_of_its_recipes_is_asked_for_by_name():
    whole, one = keepmtp("ls mimo-7b").stdout, keepmtp("ls mimo-7b.w4a16").stdout
    assert "keepmtp quantize mimo-7b\n" in whole and "keepmtp quantize mimo-7b.w4a16\n" in whole
    assert "keepmtp quantize mimo-7b.w4a16\n" in one and "fp8-dynamic" not in one
    (only,) = json.loads(keepmtp("ls mimo-7b.w4a16 --json").stdout)["models"]
    assert (only["model"], only["variant"], only["default"]) == ("mimo-7b", "w4a16", False)


@pytest.mark.full
def test_listings():
    listing = json.loads(keepmtp("ls --json").stdout)
    assert {"models", "schemes", "families"} == set(listing)
    assert [row["recipe"] for row in listing["models"]] == [row.name for row in listed()]
    assert {row["model"] for row in listing["models"]} >= {"dsv4-flash", "tiny-glm4-moe"}
    for name, found in listing.items():
        assert json.loads(keepmtp(f"ls {name} --json").stdout) == {name: found}
        shown = found[0]["family"] if name == "families" else found[0]["what"].split()[0]
        assert shown in keepmtp(f"ls {name}").stdout
    assert "glm-4.7.nvfp4a16-fp8 *" in keepmtp("ls models").stdout
    assert "NVFP4A16" in keepmtp("ls schemes").stdout
    assert "glm4_moe" in keepmtp("ls families").stdout


def test_families_say_what_can_be_calibrated_and_why_not():
    found = {
        row["family"]: row for row in json.loads(keepmtp("ls families --json").stdout)["families"]
    }
    glm, bailing = found["glm4_moe"], found["bailing_hybrid"]
    assert [glm[column] for column in COLUMNS["families"][1:]] == [
        "yes",
        "yes",
        "yes",
        "yes",
        "vllm",
    ]
    assert [bailing[column] for column in COLUMNS["families"][1:]] == [
        "yes",
        "yes",
        "no",
        "no",
        "-",
    ]
    assert "no class for model_type 'bailing_hybrid'" in bailing["why_not_backbone"]
    # transformers builds this backbone, but its MTP block cannot be run.
    assert (found["glm5_next"]["backbone"], found["glm5_next"]["mtp"]) == ("yes", "no")
    printed = keepmtp("ls families", COLUMNS="80").stdout
    assert max(map(len, printed.splitlines()[:-1])) <= 80 and "calibrate MTP" in printed


def test_schemes_say_which_searches_they_have():
    found = {row["scheme"]: row["searches"] for row in rows("schemes", [])}
    assert found["NVFP4"] == ["mse", "four-over-six", "imatrix"] and found["W4A16"] == [
        "mse",
        "imatrix",
    ]
    assert found["MXFP4"] == []
