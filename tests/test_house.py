"""What the house promises about itself: one package in the wheel, light imports, clean sources."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import house
import pytest
import yaml
from commands import ROOT, captured

SOURCES = house.sources()
FOLDERS = (*house.FLOORS, "benchmarks", "docs", "models", "tests")
# Tables of data keep their rows, one to a line. The formatter formats everything else.
TABLES = (
    "models/train/problems.py",
    "recipes/runtimes/",
    "recipes/family.py",
    "recipes/schemes.py",
    "tests/helpers/broken.py",
    "tests/helpers/dry_corpus.py",
    "tests/helpers/releases.py",
    "tests/helpers/without_mtp.py",
)
# One word, one meaning. These names have a definition in more than one file. The list may only
# become shorter.
HOMONYMS = {
    "Output",
    "Part",
    "Question",
    "Role",
    "Row",
}
# How many docstrings and comments have a vague word today. The numbers may only become smaller.
VAGUE = {
    r"\btold\b": 1,
    r"\bbeside\b": 2,
    r"\bbehind\b": 1,
    r"\blies?\b": 2,
    r"\bstands? (in|for|beside|where)\b": 0,
    r"\bbears? .{0,20}out\b": 0,
    r"\bside by side\b": 1,
}
# Sentences that people read no more.
WENT = (
    "neither passes nor fails",
    "rounds by less than",
    "Ask the probe, too",
    "at once of {",
    "needs an environment of its own; got",
    "only the source gets",
    'return "too few samples"',
    ":,} tensors are named",
    ":,.1f} sequences",
)
# Pairs of types of which one repeats the other's fields; see `house.twins`. The number may only
# become smaller. One of them: options of the command line are keys of a recipe.
TWINS = 5


# What must not grow. Whoever lowers a figure writes the new one; a capability states its price.
SIZES = {
    "tokens of the package": 301_500,
    "tokens of the tests": 348_500,
    "dense forms in 1,000 tokens": 4.4,
    "functions over 100 lines": 0,
}
# So that a good change of a few tokens passes.
SLACK = 1.02


def run(
    *words: str, cwd: Path = ROOT, status: int | None = None
) -> subprocess.CompletedProcess[str]:
    return captured(words, cwd=cwd, status=status)


def test_planning_and_checking_import_no_torch():
    """The base install has no model stack: ls, plan and check must run without one."""
    code = (
        "import importlib, pkgutil, sys, keepmtp.cli, keepmtp.cure.fix, keepmtp.pipeline\n"
        "for module in pkgutil.iter_modules(keepmtp.cli.__path__):\n"
        "    importlib.import_module(f'keepmtp.cli.{module.name}')\n"
        "for name in ('dryload.check_on', 'report.card', 'measure.serve_check', 'publish.upload'):\n"
        "    importlib.import_module(f'keepmtp.validate.{name}')\n"
        "heavy = {'torch', 'transformers', 'llmcompressor', 'vllm', 'safetensors', 'scipy'}\n"
        "assert not heavy & {*sys.modules}, heavy & {*sys.modules}"
    )
    run(sys.executable, "-c", code, status=0)


@pytest.mark.parametrize("words", [["check"], ["format", "--check"]])
def test_ruff_is_clean(words):
    run(sys.executable, "-m", "ruff", *words, ".", status=0)


def test_the_same_tools_run_by_hand_and_before_a_commit():
    """And on a first clone: the hook makes the environment that `make lint` needs."""
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    assert [hook["entry"] for hook in hooks] == ["make lint"]


def test_only_tables_of_data_keep_their_own_format():
    found = run(
        "git", "grep", "-lE", "^[^'\"]*# fmt: ?(skip|off)|\\)  # fmt: ?(skip|off)", "--", "*.py"
    ).stdout.split()
    assert found and [name for name in found if not name.startswith(TABLES)] == []


def test_a_fact_prints_itself():
    """It is one pydantic model."""
    assert [path for path in SOURCES if "def as_dict" in path.read_text()] == []


def test_a_name_has_one_meaning():
    assert house.homonyms().keys() <= HOMONYMS, house.homonyms()


def test_no_more_types_repeat_each_other():
    assert len(house.twins()) <= TWINS, house.twins()


def test_the_house_does_not_grow():
    found = house.measures()
    grown = {name: found[name] for name, limit in SIZES.items() if found[name] > SLACK * limit}
    assert grown == {}


def test_vague_words_do_not_become_more():
    found = house.vague_words()
    assert found.keys() == VAGUE.keys()
    assert {word: count for word, count in found.items() if count > VAGUE[word]} == {}, house.VAGUE


def test_words_that_went_do_not_come_back():
    """Each stopped a reader, or was a second word for `not measured`."""
    found = []
    for path in (*SOURCES, ROOT / "README.md", *ROOT.glob("docs/*.md")):
        text = path.read_text()
        found += [f"{path.name}: {words}" for words in WENT if words in text]
    assert SOURCES and found == []


def test_the_measures_find_what_they_look_for(tmp_path, monkeypatch):
    """A house that breaks each rule once."""
    fields = "    name: str\n    size: int\n    form: str\n    unit: str\n"
    imports = "from ..recipes.schema import Row as R, Gone\nfrom . import nowhere\n"
    show = f'{imports}class Row:\n    """What\n    is told."""\n{fields}'
    files = {
        "__init__.py": "",
        "__main__.py": "",
        "recipes/__init__.py": "",
        "recipes/schema.py": f"# It lies beside.\nclass Row:\n{fields}",
        "cli/__init__.py": "",
        "cli/show.py": f"{show}    word = 'behind'\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(house, "ROOT", tmp_path)
    assert house.homonyms() == {"Row": ["recipes/schema.py", "cli/show.py"]}
    assert house.code_tokens(tmp_path / "cli" / "show.py") == 34, (
        "no docstring, comment or line end"
    )
    (tmp_path / "recipes" / "long.py").write_text(f"word = '{'a ' * 19}a'\n")
    (tmp_path / "recipes" / "long.yaml").write_text("# no word\nword: [one, two-three]\n")
    assert house.code_tokens(tmp_path / "recipes" / "long.py") == 2 + 20, (
        "a page is no single token"
    )
    assert house.tokens_of(tmp_path / "recipes") == 22 + 15 + 7, "data counts like code"
    dense = "a = [b for b in c if b]\nd, e = f, g or h\ni = j or k\nl = is_m and not n\n"
    assert house.dense_forms(house.ast.parse(dense)) == 3
    assert house.twins() == [("recipes/schema.py:Row", "cli/show.py:Row")]
    found = {word: count for word, count in house.vague_words().items() if count}
    assert found == {r"\btold\b": 1, r"\bbeside\b": 1, r"\blies?\b": 1}, (
        "what a user reads does not count"
    )


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_sources_keep_to_the_rules(path):
    """Relative imports inside, no vLLM in this process, no broad except, a docstring that
    teaches.
    """
    text = path.read_text()
    absolute = r"^\s*(from|import) (recipes|checkpoints|quantize|validate|cure|cli)\b"
    assert not re.search(absolute, text, re.MULTILINE), "import relatively"
    in_vllm = ROOT / "validate" / "dryload" / "in_vllm", ROOT / "validate" / "keepmtp_cures"
    if any(map(path.is_relative_to, in_vllm)):  # vLLM's environment has no keepmtp
        assert not re.search(r"^\s*(from \.\.|(from|import) keepmtp\b)", text, re.MULTILINE), (
            "keepmtp is not there"
        )
    else:
        assert not re.search(r"^\s*(from|import) vllm\b", text, re.MULTILINE), (
            "vLLM is reached as a subprocess"
        )
    assert not re.search(r"except( \(?Exception\)?)?:", text), "broad except"
    assert "TODO" not in text and "FIXME" not in text
    if text.strip():
        assert text.startswith('"""'), (
            "a module says what comes in, what goes out, and what is easy to get wrong"
        )
    if path.is_relative_to(ROOT / "recipes"):
        assert not re.search(r"^\s*(from|import) (torch|transformers)\b", text, re.MULTILINE), (
            "recipes are pure Python"
        )


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/design.md"])
def test_a_page_about_the_code_names_files_that_are_there(page):
    quoted = re.findall(r"`([^`\n]+/[^`\n]*)`", (ROOT / page).read_text())
    linked = re.findall(r"\]\(([^):]+)\)", (ROOT / page).read_text())
    named = {ROOT / name for name in quoted if name.split("/")[0] in FOLDERS and "<" not in name}
    named |= {(ROOT / page).parent / name for name in linked}
    assert named and [str(path) for path in named if not path.exists()] == []


def test_the_whole_line_is_on_one_screen():
    """The map at the top of pipeline.py names files that are there, and `quantize` is no longer
    than a screen.
    """
    tree = house.parsed(ROOT / "pipeline.py")
    screen = house.top_level(tree)["quantize"]
    assert (screen.end_lineno or 0) - screen.lineno < 60
    stages = re.findall(r"(\w[\w/]*/(?:\w+\.py)?)  ", ast.get_docstring(tree) or "")
    assert len(stages) == 9 and [name for name in stages if not (ROOT / name).exists()] == []


def test_no_path_of_a_machine_in_the_tree():
    paths = r"(/home/[a-z]|/roo[t]/|/wor[k]/|/scratc[h])"
    found = run("git", "grep", "-nIE", paths, "--", ".", ":!tests/test_house.py")
    assert not found.stdout, found.stdout
