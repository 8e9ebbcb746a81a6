"""The make targets: what they refuse before they install anything, and which folder they take."""

import sys
from pathlib import Path

import pytest
from commands import KEEPMTP, ROOT, make

STAMPS = ("base", "quantize", "calibrate", "modelopt", "evaluate")


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A folder in which the targets run this keepmtp, as if it were installed there."""
    for name in ("pyproject.toml", "constraints.txt", "constraints-vllm.txt"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "keepmtp").symlink_to(KEEPMTP)
    for stamp in STAMPS:
        (tmp_path / ".venv" / f".{stamp}").touch()
    (tmp_path / ".venv-vllm").mkdir()
    (tmp_path / ".venv-vllm" / ".vllm").touch()
    return tmp_path


def old_python(folder: Path) -> Path:
    """A Python that says it is 3.10 and can make environments."""
    path = folder / "python3.10"
    path.write_text(
        f'#!/bin/sh\nif [ "$1" = -c ]; then exec {sys.executable} -c "import sys; '
        'sys.version_info = (3, 10, 13, \'final\', 0); exec(sys.argv[1])" "$2"; fi\nexec '
        f'{sys.executable} "$@"\n'
    )
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("target", ["quantize", "plan", "vllm", "check", "all"])
def test_an_old_python_is_one_sentence_and_leaves_nothing(target, tmp_path):
    words = (
        f"PYTHON={old_python(tmp_path)}",
        f"VENV={tmp_path}/.venv",
        f"VENV_VLLM={tmp_path}/.venv-vllm",
    )
    done = make(target, *words, status=2)
    assert done.stderr.splitlines()[0] == (
        "error: PYTHON: keepmtp needs Python 3.11 or newer; got 3.10. Run make with "
        "PYTHON=python3.11 or newer."
    )
    assert [path.name for path in tmp_path.iterdir()] == ["python3.10"]


@pytest.mark.parametrize("target", ["check", "validate", "bench", "card", "publish"])
def test_no_target_guesses_a_folder(target, checkout):
    """The folder that `make quantize` with the same words writes, and no other one that is there."""
    (checkout / "out" / "glm-4.7.nvfp4-fp8").mkdir(parents=True)
    words = ("MODEL=glm-4.7", "SCHEME=fp8-dynamic", "REPO=org/name", "DRY_RUN=1")
    done = make(target, *words, cwd=checkout, status=2)
    assert "out/glm-4.7.fp8-dynamic: " in done.stderr


def test_an_extra_is_installed_where_it_is_named(checkout):
    """`make quantize` installs torch, which is what the shipped model needs, and EXTRA the rest."""
    for stamp in ("quantize", "calibrate"):
        (checkout / ".venv" / f".{stamp}").unlink()
    for words, is_whole in (((), False), (("EXTRA=calibrate",), True)):
        said = make("-n", "quantize", *words, cwd=checkout, status=0).stdout
        assert "install -qq torch==" in said
        assert ("installing keepmtp[calibrate]" in said) == is_whole


def test_all_is_four_commands(checkout):
    said = make("-n", "all", "OUT=x", cwd=checkout, status=0).stdout
    steps = ("quantize", 'check GPU="sm90 sm100"', "validate", "card")
    assert [
        line.partition("directory ")[2] for line in said.splitlines() if "directory" in line
    ] == [*steps]


@pytest.mark.full
def test_the_line_of_a_fine_tune(checkout):
    """MODEL is a folder in every target; no other word names what was made."""
    words = (f"MODEL={ROOT}/models/tiny-glm4-moe", "SCHEME=NVFP4A16_fp8")
    for target, says in {
        "plan": "",
        "quantize": "check passed",
        "check": "out/tiny-glm4-moe.NVFP4A16_fp8",
    }.items():
        done = make(target, *words, cwd=checkout, status=0)
        assert says in done.stdout, done.stderr
