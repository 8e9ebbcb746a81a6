"""Whatever ends a command that has started others, nothing of it is left: no station, no server, no
copy of weights.

A stub is `vllm serve` here, so that there is time for many moments; tests/vllm/test_bench.py and
test_separate_draft.py have the real one.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import pytest
from commands import GLM, ROOT, started
from processes import MARK, none_left, outright, says, until
from stub_vllm import stub_vllm
from wheel import stranger

STATUS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}
SERVER = "vllm.entrypoints.cli.main serve"
End = Callable[..., str]
each_signal = pytest.mark.parametrize("number", STATUS)


@pytest.fixture
def end(tmp_path) -> End:
    """Starts a command in an environment of which every descendant carries a mark, with the stub as
    its vLLM. Ends it some seconds after a descendant with these words on its command line runs;
    gives what it said, with nothing left.
    """
    real = Path(os.environ.get("VLLM_PYTHON", ROOT / ".venv-vllm" / "bin" / "python"))
    python = stub_vllm(tmp_path, real=real, start=0.3, answer=0.05)
    mark = uuid4().hex
    ours = {"VLLM_PYTHON": str(python), "OMP_NUM_THREADS": "1", MARK: mark}

    def run(command: str, words: str, number: signal.Signals, *, after: float = 0.0) -> str:
        env = stranger(TMPDIR=str(tmp_path), **ours)
        process = started(command, stdout=subprocess.DEVNULL, cwd=ROOT, env=env)
        # A look at every process takes 5 ms.
        until(lambda: says(mark, words), seconds=600, pause=0.1, by=process)
        time.sleep(after)
        process.send_signal(number)
        said = process.communicate(timeout=600)[1]
        assert process.returncode == STATUS[number] and "Traceback" not in said, said
        none_left(mark)
        return said

    return run


@pytest.mark.few(2)
@each_signal
@pytest.mark.parametrize(
    "after", [0.0, 0.5, 1.2], ids=["a server starts", "it answers", "or the next one"]
)
def test_acceptance(end, tmp_path, number, after):
    command = f"eval {GLM} --only acceptance --source none --out {tmp_path}/out"
    said = end(command, SERVER, number, after=after)
    if number != signal.SIGKILL:
        assert "stopped by" in said and not [*tmp_path.glob("keepmtp-*")]


@pytest.mark.few(1)
@outright
def test_check_on_a_pretended_gpu(end, number):
    end(f"check {GLM} --gpu sm90", "in_vllm", number, after=0.5)
