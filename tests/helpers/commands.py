"""The command, run as people type it."""

import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

KEEPMTP = str(Path(sys.executable).with_name("keepmtp"))
ROOT = Path(__file__).parent.parent.parent
# The small model that most tests read and quantize.
GLM = ROOT / "models" / "tiny-glm4-moe"
# For a command that calibrates; -P: it finds no module of benchmarks/.
IN_F32 = ("-P", str(ROOT / "benchmarks" / "f32_products.py"))


def captured(
    words: Sequence[str | Path], *, status: int | None = None, **more: Any
) -> subprocess.CompletedProcess[str]:
    """A program that ran to its end, with what it printed; and with this status, if one is given."""
    done = subprocess.run(words, capture_output=True, text=True, **more)
    assert status in (None, done.returncode), f"{words}\n{done.stdout[-2000:]}{done.stderr[-3000:]}"
    return done


def environment_without(*names: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in names}


def started(command: str, **more: Any) -> subprocess.Popen[str]:
    """A command line that runs now. conftest.py has seen to it that it hears Ctrl-C."""
    line = [KEEPMTP, *command.split()]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **more}
    return subprocess.Popen(line, text=True, **pipes)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def make(
    *words: str, cwd: Path = ROOT, status: int | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """A make target of the checkout, without what an outer make left in the environment."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    command = ["make", "-f", str(ROOT / "Makefile"), *words]
    return captured(command, status=status, cwd=cwd, env=clean | environment)


def keepmtp(
    command: str = "",
    *words: str | Path,
    cwd: Path | None = None,
    status: int | None = None,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """A command line as it is typed, after `keepmtp`; further words as they are."""
    line = [KEEPMTP, *shlex.split(command), *map(str, words)]
    return captured(line, status=status, cwd=cwd, env=os.environ | environment)


def ran(command: str, *, status: int = 0, cwd: Path | None = None, **environment: str) -> str:
    """What a command that ends with this status has answered on standard output."""
    return keepmtp(command, cwd=cwd, status=status, **environment).stdout


def shell(command: str, folder: Path) -> None:
    """What somebody types in a folder."""
    subprocess.run(command, shell=True, cwd=folder, check=True)


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
    packages: tuple[str, ...], command: str, *, cwd: Path, status: int = 2
) -> subprocess.CompletedProcess[str]:
    """The command where these packages are not installed."""
    line = [sys.executable, "-c", HIDE.format(packages=packages), *shlex.split(command)]
    return captured(line, status=status, cwd=cwd)


def refused(
    command: str,
    *words: str,
    says: str,
    status: int = 2,
    cwd: Path | None = None,
    **environment: str,
) -> None:
    """One sentence on standard error, and nothing on standard output."""
    done = keepmtp(command, *words, cwd=cwd, status=status, **environment)
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    assert "; got " in done.stderr and done.stderr.rstrip().endswith((".", "?"))
    assert says in done.stderr


def assert_shows(text: str, *says: str) -> None:
    """Each of these is in a text, whatever its columns, rules and line ends are."""
    flat = " ".join(text.replace("─", " ").split())
    for words in says:
        assert words in flat, f"{words}\n{text}"
