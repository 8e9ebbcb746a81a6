"""A server is known to be keepmtp's own: nobody else can answer for it. A stub takes vLLM's place."""

import os
import signal
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from keepmtp.validate.facts.vllm_env import VLLM, find_vllm
from keepmtp.validate.measure.server import ServerFailed, serving
from stub_vllm import stub_vllm


@pytest.fixture
def vllm(monkeypatch, tmp_path) -> VLLM:
    monkeypatch.setenv("VLLM_PYTHON", str(stub_vllm(tmp_path, start=0.5)))
    return find_vllm()


def test_two_servers_at_once_never_answer_for_each_other(vllm, tmp_path):
    folders = [tmp_path / f"checkpoint-{number}" for number in range(8)]

    def text_of(folder: Path) -> str:
        with serving(vllm, folder, k=1, log=folder.with_suffix(".log"), timeout=60) as server:
            return server.complete("1 + 1?", max_tokens=4).text

    with ThreadPoolExecutor(len(folders)) as pool:
        assert list(pool.map(text_of, folders)) == [str(folder) for folder in folders]


@pytest.mark.parametrize("is_long", [False, True])
def test_the_socket_is_in_a_folder_of_this_user_alone(monkeypatch, vllm, tmp_path, is_long):
    """A socket's path has 107 characters at most. Where the folder for such things has a long name, it is in /tmp."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / ("long" * 30 * is_long or "short")))
    Path(os.environ["TMPDIR"]).mkdir()
    monkeypatch.setattr("tempfile.tempdir", None)
    with serving(vllm, tmp_path, k=1, log=tmp_path / "log", timeout=60) as server:
        words = Path(f"/proc/{server.process.pid}/cmdline").read_text().split("\0")
        socket = Path(words[words.index("--uds") + 1])
        assert stat.S_IMODE(socket.parent.stat().st_mode) == 0o700 and socket.is_socket()
        assert not {"--port", "--host"} & set(words)
    assert not socket.parent.exists()


def test_a_front_end_that_is_killed_is_not_believed(vllm, tmp_path):
    """Nor is its engine left behind, which vLLM's front end alone would have ended."""
    with serving(vllm, tmp_path, k=1, log=tmp_path / "log", timeout=60) as server:
        (front,) = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
        os.kill(int(front), signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(ServerFailed, match="ended by SIGKILL"):
            server.complete("1 + 1?", max_tokens=4)
        assert time.monotonic() - start < 10
