"""keepmtp's sdist, made of what git tracks, its wheel, and environments that have one extra of it
and nothing else.

What it needs comes from build/wheels, which `make test` fills: no index is asked, and uv links the
files instead of copying them, so that an environment costs seconds.
"""

import subprocess
import sys
from pathlib import Path

from commands import ROOT, captured, environment_without

WHEELS = ROOT / "build" / "wheels"
UV = str(Path(sys.executable).with_name("uv"))
_OFFLINE = ("--no-index", "--find-links", str(WHEELS))


def build(folder: Path) -> Path:
    """The sdist of a copy of the checkout, and the wheel that is built from it; returns the wheel.

    A copy: files that git does not know, and files that were built before, must not help.
    """
    assert WHEELS.is_dir(), "run `make build/wheels/.wheels`, as `make test` does"
    for name in tracked():
        (folder / "src" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "src" / name).write_bytes((ROOT / name).read_bytes())
    _run(UV, "build", "-q", *_OFFLINE, "--out-dir", str(folder), str(folder / "src"))
    (wheel,) = folder.glob("*.whl")
    return wheel


def tracked() -> list[str]:
    """The files of the checkout that git has or would take; in an unpacked sdist, those that its
    own list names.
    """
    if (ROOT / ".git").exists():
        listed = _run("git", "ls-files", "-co", "--exclude-standard", cwd=ROOT).stdout.splitlines()
    else:
        listed = (ROOT / "keepmtp.egg-info" / "SOURCES.txt").read_text().splitlines()
    return [
        name
        for name in listed
        if (ROOT / name).is_file() and not name.startswith("keepmtp.egg-info/")
    ]


def install(wheel: Path, extra: str, folder: Path) -> Path:
    """An environment with this extra of the wheel and nothing else ("" for none); returns its bin
    folder.
    """
    wanted = f"keepmtp{f'[{extra}]' if extra else ''} @ {wheel.as_uri()}"
    _run(UV, "venv", "-q", "--python", sys.executable, str(folder))
    _run(UV, "pip", "install", "-q", *_OFFLINE, "--python", str(folder / "bin" / "python"), wanted)
    return folder / "bin"


def stranger(**changes: str) -> dict[str, str]:
    """The environment of somebody who has installed keepmtp and nothing else."""
    ours = ("PYTHONPATH", "VIRTUAL_ENV", "VLLM_PYTHON", "HF_TOKEN")
    return environment_without(*ours) | changes


def _run(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return captured(words, cwd=cwd, status=0)
