"""A stranger's wheel for `check --vllm` ends in one sentence, and only vLLM's Python is kept of it."""

from dataclasses import replace

import pytest
import verbs
from data_files import spelled
from edits import ODD
from keepmtp.recipes.errors import VLLMError
from keepmtp.validate.dryload import loader
from keepmtp.validate.dryload.loader import DryLoader, Job
from keepmtp.validate.dryload.versions import cache_folder, had_vllms
from real_vllm import CPU
from wheels import ABOUT, GOOD, NOTED, WHEEL, listed, zipped

WHOLE = "must be a whole wheel"
PLAIN = "must be a wheel of vLLM"
SAYS = "must say which version"
MOST = "at most 0.2 GiB; got "
BUILDS = "must build models for a pretended sm90; got "
NO_UTF_8 = zipped(GOOD | {"vllm/\u00e9.py": b""}).replace(b"\xc3\xa9", b"\xff\xff")
STRANGE = dict.fromkeys(ODD["members"], b"x = 1\n")


def telling(*told: str | list[tuple[str, int]]) -> bytes:
    """A wheel that says this of its version."""
    about, noted = (spelled(each).encode() for each in told)
    return zipped(GOOD | {ABOUT: about, NOTED: noted})


def running(program: str) -> bytes:
    return zipped(GOOD | {"vllm/__init__.py": program.encode()})


@pytest.fixture
def loaded(tmp_path, monkeypatch):
    """What a wheel ends in: no vLLM is in any, so it is a refusal."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    own = replace(CPU, python=verbs.no_server(tmp_path / "python"))

    def load(raw: bytes) -> str:
        (tmp_path / WHEEL).write_bytes(raw)
        with pytest.raises(VLLMError) as caught:
            (vllm,) = had_vllms([str(tmp_path / WHEEL)], own)[0]
            with DryLoader(vllm, gpu="sm90") as process:
                process.load_all([Job(folder=tmp_path)])
        return str(caught.value)

    return load


@pytest.mark.parametrize(
    "raw, says",
    [
        (listed(zipped(GOOD), 0, "flags", 1), WHOLE),
        (listed(zipped(GOOD), 0, "method", 99), PLAIN),
        (listed(zipped(GOOD), 0, "method", 14), PLAIN),
        (listed(zipped(GOOD), 2, "size", 2**31), f"{MOST}2.0 GiB"),
        (NO_UTF_8, WHOLE),
        (telling([("Name: vllm\nVersion: ", 1), ("9", 5000)], ""), SAYS),
        (telling("Name: vllm\nVersion: ../../x\n", ""), SAYS),
        (telling("", [("__version__ = ", 1), ("''", 200_000), ("x", 1)]), SAYS),
        (running(""), f"{BUILDS}exit status 0"),
        *((running(program), BUILDS) for program in ODD["programs"]),
    ],
)
def test_a_hostile_wheel_is_one_sentence(raw, says, loaded):
    told = loaded(raw)
    assert says in told and "\n" not in told and len(told) < 5000, told


def test_a_vllm_that_never_answers_is_killed(loaded, monkeypatch):
    monkeypatch.setattr(loader, "_ANSWER_SECONDS", 1.0)
    assert f"{BUILDS}exit status -9" in loaded(running("while True: pass"))


def test_only_the_python_of_vllm_is_kept(loaded, tmp_path):
    loaded(zipped(GOOD | STRANGE))
    (site,) = cache_folder().iterdir()
    kept = {path.relative_to(site).as_posix() for path in site.rglob("*") if path.is_file()}
    assert kept == GOOD.keys()
    assert {path.name for path in tmp_path.iterdir()} == {"cache", "python", "stub", WHEEL}
