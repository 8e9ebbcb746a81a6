"""A command that keepmtp prints or documents is one that exists, with its options, where it is
printed.

In: every string of the package, and the pages. Out: nothing, or the command that nobody can run.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import house
import pytest
import typer
from commands import ROOT
from keepmtp.cli import main
from keepmtp.recipes.extras import install_command

MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z][a-z-]*):", MAKEFILE, re.MULTILINE))
VARIABLES = set(re.findall(r"\b([A-Z][A-Z_0-9]*)\b", MAKEFILE))
# A wheel has no Makefile. These files know that they are in a checkout, or are called by make
# alone.
SPEAK_OF_MAKE = {"cli/quantize.py", "validate/facts/vllm_env.py"}
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Commands in backticks, and those that a sentence begins or ends with.
QUOTED = re.compile(
    r"`((?:keepmtp|make) [^`]+)`|(?:[Rr]un|target:) ((?:keepmtp|make) [a-z-]+(?: [^`.;]*)?)"
)


def strings(path: Path) -> Iterator[str]:
    """Every string of a file, an f-string with an X for each value."""
    inside = set()
    for node in ast.walk(house.parsed(path)):  # an f-string comes before its parts
        if isinstance(node, ast.JoinedStr):
            inside |= {id(part) for part in node.values}
            words = [p.value if isinstance(p, ast.Constant) else "X" for p in node.values]
            yield "".join(words)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from [node.value] if id(node) not in inside else []


def commands(text: str) -> Iterator[list[str]]:
    for found in QUOTED.finditer(" ".join(text.split())):
        yield (found[1] or found[2]).split()


def options_of(verb: str) -> set[str]:
    known = typer.main.get_command(main.app).get_command(None, verb)
    return {"--help", "-h"} | {
        name for option in known.params for name in (*option.opts, *option.secondary_opts)
    }


def fault(words: list[str]) -> str:
    """Why nobody can run this command; "" if it can be run."""
    program, name, *rest = words
    if program == "make":
        if name not in TARGETS:
            return f"no target {name}"
        for word in rest:
            if "=" in word and word.partition("=")[0] not in VARIABLES:
                return f"no variable {word}"
        return ""
    if name not in main.VERBS:
        is_verb = re.fullmatch(r"[a-z-]+", name) and not name.startswith("-")
        return f"no verb {name}" if is_verb else ""
    for word in rest[: rest.index("--")] if "--" in rest else rest:
        if re.match(r"--?[a-z]", word) and word.strip(",)") not in options_of(name):
            return f"keepmtp {name} has no {word}"
    return ""


@pytest.mark.parametrize("path", house.sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_printed_command_exists(path):
    found = [words for text in strings(path) for words in commands(text)]
    assert [(" ".join(words), why) for words in found if (why := fault(words))] == []
    if str(path.relative_to(ROOT)) not in SPEAK_OF_MAKE:
        assert [words for words in found if words[0] == "make"] == [], "a wheel has no Makefile"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_documented_command_exists(page):
    text = page.read_text()
    blocks = "\n".join(re.findall(r"```\n(.*?)```", text, re.DOTALL))
    lines = re.findall(r"^((?:keepmtp|make) [^\n#]+)", blocks, re.MULTILINE)
    found = [*commands(text), *(line.split() for line in lines)]
    assert [(" ".join(words), why) for words in found if (why := fault(words))] == []


def test_the_test_finds_what_nobody_can_run():
    for text, why in {
        "Run `keepmtp chekc X`": "no verb chekc",
        "Use `keepmtp check X --static` again": "keepmtp check has no --static",
        "Run keepmtp server X": "no verb server",
        "Run `make everything`": "no target everything",
        "`make publish MODEL=x REPOSITORY=y`": "no variable REPOSITORY=y",
    }.items():
        assert [fault(words) for words in commands(text)] == [why], text
    for good in (
        "`keepmtp eval X -- --max-model-len 8`",
        "`keepmtp check X --gpu sm90 -k 3`",
        "`make publish REPO=a/b`",
    ):
        assert [fault(words) for words in commands(good)] == [""], good


def test_an_extra_is_added_to_this_installation():
    """keepmtp is on no index: the command names this Python, where it is installed already."""
    for path in house.sources():
        bare = [
            text
            for text in strings(path)
            if re.search(r"(?<!-m )(?<!uv )\bpip install '?keepmtp", text)
        ]
        assert bare == [] or path.name == "card_page.py", path
    assert install_command("report").endswith("-m pip install 'keepmtp[report]'")


def test_a_command_that_was_said_leaves_modelopt_importable():
    """Looking for the module pip would make setuptools drop its distutils, which torch's extensions
    are built by.
    """
    lines = (
        "from keepmtp.recipes.extras import install_command; install_command('modelopt'); import "
        "setuptools"
    )
    subprocess.run([sys.executable, "-c", lines], check=True, capture_output=True)
