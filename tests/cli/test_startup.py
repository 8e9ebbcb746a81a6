"""Help and listings are there at once: what they load is named here, and nothing slow is among it.

No clock: which modules a command has loaded is the same on every machine.
"""

import inspect
import json
import subprocess
import sys

import pytest
from keepmtp.cli.main import VERBS

SLOW = {
    *[
        "datasets",
        "httpx",
        "huggingface_hub",
        "jinja2",
        "lm_eval",
        "matplotlib",
        "numpy",
        "pydantic",
        "requests",
        "rich",
        "safetensors",
        "torch",
        "transformers",
        "yaml",
    ]
}
HARNESS = """
import json, sys
from keepmtp.cli.main import main
try:
    main()
finally:
    json.dump(sorted(sys.modules), sys.stderr)
"""


def loaded(*words: str) -> tuple[set[str], str]:
    """The modules that a command has loaded, and what it said."""
    done = subprocess.run([sys.executable, "-c", HARNESS, *words], capture_output=True, text=True)
    return set(json.loads(done.stderr.splitlines()[-1])), done.stdout


def slow(modules: set[str]) -> set[str]:
    return SLOW & {name.partition(".")[0] for name in modules}


@pytest.mark.parametrize("words", ["--help", "-h", "--version", "-V"])
def test_help_and_version_load_no_verb(words):
    modules, said = loaded(words)
    assert said and not slow(modules)
    ours = {name for name in modules if name.partition(".")[0] == "keepmtp"}
    ends = " .checkpoints .checkpoints.files .cli .cli.exits .cli.main .recipes .recipes.errors"
    assert ours == {f"keepmtp{end}" for end in ends.split(" ")}


@pytest.mark.parametrize("words", ["ls", "ls glm-4.7", "ls --help"])
def test_the_screen_of_models_needs_yaml_alone(words):
    modules, said = loaded(*words.split())
    assert said and slow(modules) == {"yaml"}


@pytest.mark.parametrize("listing", ["models", "schemes", "families"])
def test_a_listing_is_validated_by_nobody(listing):
    modules, said = loaded("ls", listing)
    assert said and slow(modules) == {"yaml", "rich"}


@pytest.mark.parametrize("verb", sorted(VERBS.keys() - {"ls"}))
def test_the_help_of_a_verb_loads_no_station(verb):
    modules, said = loaded(verb, "--help")
    assert said.startswith(f"Usage: -c {verb} [OPTIONS]") and slow(modules) <= {"rich", "yaml"}
    words = " ".join(said.split())
    assert words.count(VERBS[verb].help) == 1, "what `keepmtp --help` says of it"
    assert all(len(line) <= 80 for line in said.splitlines() if "`" not in line), (
        "but commands, which stay whole"
    )


@pytest.mark.parametrize("verb", VERBS)
def test_the_table_says_what_the_docstrings_say(verb):
    first, _, _ = str(inspect.getdoc(VERBS[verb].load())).partition("\n\n")
    assert VERBS[verb].help == " ".join(first.split())


def test_help_names_the_verbs_in_the_order_of_work():
    _, said = loaded("--help")
    shown = [name for name in VERBS if name not in ("extra", "where")]
    places = [said.index(f"\n  {name} ") for name in shown]
    assert places == sorted(places) and "extra" not in said
    assert all(VERBS[name].help in " ".join(said.split()) for name in shown)
