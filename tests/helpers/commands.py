"""The command, run as people type it."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

KEEPMTP = str(Path(sys.executable).with_name("keepmtp"))
ROOT = Path(__file__).parent.parent.parent


def make(*words: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """A make target of the checkout, without what an outer make left in the environment."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    command = ["make", "-f", str(ROOT / "Makefile"), *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=clean | environment)


def keepmtp(
    command: str = "", *words: str | Path, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """A command line as it is typed, after `keepmtp`; further words as they are."""
    line = [KEEPMTP, *shlex.split(command), *map(str, words)]
    return subprocess.run(
        line, capture_output=True, text=True, cwd=cwd, env=os.environ | environment
    )


HIDE = """
import importlib.metadata, sys
known, hidden = importlib.metadata.version, {packages!r}

def version(name):
    if name in hidden:
        raise importlib.metadata.PackageNotFoundError(name)
    return known(name)

importlib.metadata.version = version
sys.modules |= dict.fromkeys(name.replace("-", "_") for name in hidden)
from keepmtp.cli.main import main
main()
"""


def keepmtp_without(
    packages: tuple[str, ...], command: str, *words: str, cwd: Path
) -> subprocess.CompletedProcess[str]:
    """The command where these packages are not installed."""
    hide = HIDE.format(packages=packages)
    return subprocess.run(
        [sys.executable, "-c", hide, *shlex.split(command), *words],
        capture_output=True,
        text=True,
        cwd=cwd,
    )


def refused(command: str, *words: str, says: str, status: int = 2, cwd: Path | None = None) -> None:
    done = keepmtp(command, *words, cwd=cwd)
    assert done.returncode == status, done.stdout + done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    assert "; got " in done.stderr and done.stderr.rstrip().endswith((".", "?"))
    assert says in done.stderr
