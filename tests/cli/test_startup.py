"""Help and listings are there at once: what they load is named here, and nothing slow is among it;
and what help says, whole.

No clock: which modules a command has loaded is the same on every machine.
"""

import json
import os
import subprocess
import sys

import pytest
import typer
from commands import keepmtp
from data_files import cases, printed
from keepmtp import __version__
from keepmtp.cli.main import VERBS, app

SLOW = """datasets httpx huggingface_hub jinja2 lm_eval matplotlib numpy pydantic requests rich
safetensors torch transformers yaml"""
HARNESS = """
import json, sys
from keepmtp.cli.main import main
sys.argv[0] = "keepmtp"
try:
    main()
finally:
    json.dump(sorted(sys.modules), sys.stderr)
"""


def loaded(words: str) -> tuple[set[str], str]:
    """The modules that a command has loaded, and what it said on 80 columns."""
    line = [sys.executable, "-c", HARNESS, *words.split()]
    narrow = os.environ | {"COLUMNS": "80"}
    done = subprocess.run(line, capture_output=True, text=True, env=narrow)
    return {*json.loads(done.stderr.splitlines()[-1])}, done.stdout


def slow(modules: set[str]) -> set[str]:
    return {*SLOW.split()} & {name.partition(".")[0] for name in modules}


@cases
def test_help_and_version_load_no_verb(words):
    modules, said = loaded(words)
    assert not slow(modules)
    ours = {name for name in modules if name.partition(".")[0] == "keepmtp"}
    ends = " .checkpoints .checkpoints.files .cli .cli.exits .cli.main .recipes .recipes.errors"
    assert ours == {f"keepmtp{end}" for end in ends.split(" ")}
    if words in ("--help", "-h"):
        printed("help.txt", said)
    else:
        assert said == f"keepmtp {__version__}\n"


def test_no_word_at_all_is_help_on_standard_error():
    assert keepmtp().stderr == keepmtp("--help").stdout


@cases
def test_a_listing_is_validated_by_nobody(words, needed):
    modules, said = loaded(words)
    assert said and slow(modules) == {*needed.split()}


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_a_verb_loads_no_station(verb):
    """Commands in backticks stay whole, all else is broken at 80 columns; each option has words."""
    modules, said = loaded(f"{verb} -h")
    assert slow(modules) <= {"rich", "yaml"}
    assert said.startswith(f"Usage: keepmtp {verb} ")
    examples = [line for line in said.splitlines() if line.startswith("  Example: `")]
    assert examples and all(line.endswith("`") for line in examples)
    assert max(len(line) for line in said.splitlines() if line not in examples) <= 80
    known = typer.main.get_command(app).get_command(None, verb)
    assert [option.name for option in known.params if not option.help] == []
