"""Children of keepmtp: what they know, and that nothing of them is left, whatever ends whom."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from uuid import uuid4

import pytest
from commands import GLM, ROOT, captured
from keepmtp.quantize.run.child import Child, answer, environment
from processes import MARK, marked, none_left, only_child, outright, until

VLLM_PYTHON = Path(os.environ.get("VLLM_PYTHON", ROOT / ".venv-vllm" / "bin" / "python"))
KEEPMTP = str(Path(sys.executable).with_name("keepmtp"))
# A child, its own child, and one more that leads a session of its own, as torchrun's workers do.
TREE = """
import subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
subprocess.Popen([sys.executable, "-c", "import subprocess, time; subprocess.Popen(%r); time.sleep(600)" % sleep])
subprocess.Popen(sleep, start_new_session=True)
print("up", flush=True)
time.sleep(600)
"""
OWNER = f"""
import sys
from keepmtp.quantize.run.child import Child, environment
with Child([sys.executable, "-c", {TREE!r}], environment=environment(is_ours=True)) as child:
    child.process.wait()
"""


SECRETS = (
    "HF_TOKEN HUGGING_FACE_HUB_TOKEN HF_OIDC_RESOURCE AWS_SECRET_ACCESS_KEY AWS_ACCESS_KEY_ID GH_PAT "
    "OPENAI_API_KEY OPENAI_APIKEY VLLM_API_KEY DB_PASS DATABASE_URL PGPASSWORD SESSION HTTPS_PROXY "
    "RAY_REDIS_PASSWORD HOMEBREW_GITHUB"
)
READ = (
    "LD_LIBRARY_PATH LC_ALL XDG_CACHE_HOME VLLM_USE_V2 VLLM_CPU_KVCACHE_SPACE TORCH_LOGS HF_HOME "
    "TORCHINDUCTOR_CACHE_DIR PYTORCH_CUDA_ALLOC_CONF CUDA_VISIBLE_DEVICES CUDAHOSTCXX NCCL_DEBUG "
    "HIP_VISIBLE_DEVICES OMP_NUM_THREADS MKL_NUM_THREADS RAY_ADDRESS http_proxy no_proxy CC TMPDIR"
)


@pytest.fixture
def mark(monkeypatch) -> str:
    word = uuid4().hex
    monkeypatch.setenv(MARK, word)
    return word


@outright
@pytest.mark.parametrize("num_processes", range(1, 6))
def test_nothing_is_left_of_a_parent_that_is_ended(mark, number, num_processes):
    """Ended as soon as so many of its five processes run: the supervisor, the child, and three of
    the child's.
    """
    with subprocess.Popen([sys.executable, "-c", OWNER]) as owner:
        until(lambda: len(marked(mark)) > num_processes)
        owner.send_signal(number)
        assert owner.wait(timeout=60) == -number
    none_left(mark)


@outright
def test_nothing_is_left_of_a_supervisor_that_is_ended(mark, number):
    """After SIGKILL, its child dies at once and the others of its process group when keepmtp sees
    it.
    """
    tree = TREE.replace("start_new_session=True", "") if number == signal.SIGKILL else TREE
    with Child([sys.executable, "-c", tree], environment=environment(is_ours=True)) as child:
        until(lambda: len(marked(mark)) == 5)
        child.process.send_signal(number)
        child.process.wait(timeout=60)
    none_left(mark)


def test_a_child_that_is_killed_takes_its_own_along(mark):
    """As when vLLM's front end is killed: its engine would keep the memory."""
    with Child(
        [sys.executable, "-c", TREE], environment=environment(is_ours=True), stdout=subprocess.PIPE
    ) as child:
        assert child.process.stdout.readline() == b"up\n"
        os.kill(only_child(child.process.pid), signal.SIGKILL)
        assert child.process.wait(timeout=60) == -signal.SIGKILL, "its own status"
        none_left(mark)


def test_a_child_may_end_in_order(tmp_path):
    program = (
        "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: "
        "sys.exit(7))\nprint(1, flush=True)\ntime.sleep(600)"
    )
    with Child(
        [sys.executable, "-c", program],
        environment=environment(),
        grace_seconds=60,
        stdout=subprocess.PIPE,
    ) as child:
        child.process.stdout.readline()
    assert child.process.returncode == 7


def test_what_is_no_executable(tmp_path):
    with pytest.raises(subprocess.CalledProcessError) as caught:
        answer([tmp_path / "nothing"], environment=environment(), timeout=60)
    assert "No such file or directory" in caught.value.stderr


def test_an_offline_child_gets_no_secret(monkeypatch):
    for name in SECRETS.split():
        monkeypatch.setenv(name, "https://me:hf_secret@proxy" if "PROXY" in name else "hf_secret")
    for name in READ.split():
        monkeypatch.setenv(name, "as_is")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    words = [sys.executable, "-c", "import os; print(dict(os.environ))"]
    said = answer(words, environment=environment(), timeout=60)
    assert "hf_secret" not in said and "'HF_HUB_OFFLINE': '1'" in said
    assert [name for name in READ.split() if f"'{name}': 'as_is'" not in said] == []
    assert "hf_secret" in answer(words, environment=environment(reaches_hub=True), timeout=60)


@pytest.mark.full
@pytest.mark.skipif(
    not VLLM_PYTHON.is_file(), reason="no vLLM environment; `make test` sets one up"
)
def test_nothing_of_the_current_folder_is_run(monkeypatch, tmp_path):
    """A stranger's folder may hold modules with the names of the standard library's, and a
    .venv-vllm.
    """
    evil = (
        f"#!{sys.executable}\nimport os\nopen({str(tmp_path / 'ran')!r}, "
        "'a').write(os.environ.get('HF_TOKEN', 'x'))\n"
    )
    folder = tmp_path / "strange"
    (folder / ".venv-vllm" / "bin").mkdir(parents=True)
    for name in ("platform.py", "json.py", "keepmtp.py", "vllm.py", ".venv-vllm/bin/python"):
        (folder / name).write_text(evil)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("VLLM_PYTHON", str(VLLM_PYTHON))
    model = str(GLM)
    captured([KEEPMTP, "check", model, "--gpu", "sm90"], cwd=folder, status=0)
    monkeypatch.delenv("VLLM_PYTHON")
    captured([KEEPMTP, "doctor"], cwd=folder)
    assert not (tmp_path / "ran").exists()


def test_a_stop_that_comes_while_the_child_starts_reaches_it():
    """In a third of the tries it came between fork and exec, where a handler of Python's loses it."""
    for _ in range(12):
        with Child(["sleep", "600"], environment=environment()) as child:
            own = child.process.pid
            started = Path(f"/proc/{own}/task/{own}/children")
            while not started.read_text():
                pass
            child.process.terminate()
            assert child.process.wait(timeout=60) == -signal.SIGTERM
