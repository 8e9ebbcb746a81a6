"""What the house promises about itself: one package in the wheel, light imports, clean sources."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FLOORS = ("recipes", "checkpoints", "quantize", "validate", "cli")
SOURCES = [
    ROOT / "__init__.py",
    ROOT / "__main__.py",
    *(path for floor in FLOORS for path in (ROOT / floor).rglob("*.py")),
]


def run(*words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, cwd=cwd, capture_output=True, text=True)


def test_planning_and_checking_import_no_torch():
    """The base install has no model stack: ls, plan and check must run without one."""
    code = (
        "import importlib, pkgutil, sys, keepmtp.cli.pipeline, keepmtp.validate.dryload.check_on;"
        "import keepmtp.validate.publish.card, keepmtp.validate.serving.serve_check, keepmtp.validate.publish.upload;"
        "names = {module.name for module in pkgutil.iter_modules(keepmtp.cli.__path__)};"
        "[importlib.import_module(f'keepmtp.cli.{name}') for name in names];"
        "heavy = {'torch', 'transformers', 'llmcompressor', 'vllm', 'safetensors'} & set(sys.modules); print(heavy);"
        "sys.exit(bool(heavy))"
    )
    done = run(sys.executable, "-c", code)
    assert done.returncode == 0, done.stdout + done.stderr


def test_ruff_is_clean():
    done = run(sys.executable, "-m", "ruff", "check", ".")
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_sources_keep_to_the_rules(path):
    """Relative imports inside, no vLLM in this process, no broad except, a docstring that teaches."""
    text = path.read_text()
    absolute = r"^\s*(from|import) (recipes|checkpoints|quantize|validate|cli)\b"
    assert not re.search(absolute, text, re.MULTILINE), "import relatively"
    if path.is_relative_to(ROOT / "validate" / "dryload" / "in_vllm"):  # vLLM's environment has no keepmtp
        assert not re.search(r"^\s*(from \.\.|(from|import) keepmtp\b)", text, re.MULTILINE), "keepmtp is not there"
    else:
        assert not re.search(r"^\s*(from|import) vllm\b", text, re.MULTILINE), "vLLM is reached as a subprocess"
    assert not re.search(r"except( \(?Exception\)?)?:", text), "broad except"
    assert "TODO" not in text and "FIXME" not in text
    if text.strip():
        assert text.startswith('"""'), "a module says what comes in, what goes out, and what is easy to get wrong"
    if path.is_relative_to(ROOT / "recipes"):
        assert not re.search(r"^\s*(from|import) (torch|transformers)\b", text, re.MULTILINE), "recipes are pure Python"


def test_no_path_of_a_machine_in_the_tree():
    paths = r"(/home/[a-z]|/roo[t]/|/wor[k]/|/scratc[h])"
    found = run("git", "grep", "-nIE", paths, "--", ".", ":!tests/test_house.py")
    assert not found.stdout, found.stdout
