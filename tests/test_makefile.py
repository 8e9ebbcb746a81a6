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


@pytest.mark.parametrize("target", ["quantize", "all"])
def test_a_hub_out_of_reach_is_found_before_anything_is_installed(target, checkout):
    for stamp in STAMPS[1:]:
        (checkout / ".venv" / f".{stamp}").unlink()
    done = make(target, "MODEL=dsv4-flash", "TRUST_REMOTE_CODE=1", cwd=checkout, HF_HUB_OFFLINE="1")
    assert done.returncode == 2 and "the Hub must be reachable" in done.stderr
    assert "installing" not in done.stdout + done.stderr
    assert not (checkout / ".venv" / ".calibrate").exists()


@pytest.mark.parametrize("target", ["check", "validate", "bench", "card", "publish"])
def test_no_target_guesses_a_folder(target, checkout):
    """With two variants there, none is taken because its name comes first in the alphabet."""
    for variant in ("fp8-dynamic", "nvfp4-fp8"):
        made = checkout / "out" / f"glm-4.7.{variant}"
        made.mkdir(parents=True)
        (made / "keepmtp.json").write_text("{}")
    words = ("MODEL=glm-4.7", "REPO=org/name", "DRY_RUN=1")
    done = make(target, *words, cwd=checkout, status=2)
    assert (
        "got out/glm-4.7.fp8-dynamic, out/glm-4.7.nvfp4-fp8. Run make quantize, or name a folder by"
        in done.stderr
    )


def test_a_run_installs_what_its_plan_needs(checkout):
    """The run itself asks for it: no other command makes the plan before."""
    (checkout / ".venv" / ".quantize").unlink()
    done = make("quantize", cwd=checkout, status=2)
    assert "installing torch" in done.stdout and "tiny-glm4-moe" not in done.stderr
    assert not (checkout / "out").exists()


@pytest.mark.full
def test_the_line_of_a_fine_tune(checkout):
    """MODEL is a folder in every target; no other word names what was made."""
    words = (f"MODEL={ROOT}/models/tiny-glm4-moe", "SCHEME=NVFP4A16_fp8")
    for target, says in {
        "plan": "",
        "quantize": "check passed",
        "check": "out/tiny-glm4-moe.nvfp4a16-fp8",
    }.items():
        done = make(target, *words, cwd=checkout, status=0)
        assert says in done.stdout, done.stderr
