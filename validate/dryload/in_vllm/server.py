"""The process that loads: it imports vLLM once for a GPU, then forks a child for every checkpoint.

In: the GPU's name as argument, jobs as JSON lines on standard input. Out: JSON lines on standard output: first
{"ready": GPU}, then {"id", "account"} for each job, in the order in which they end; {"id", "died"} for a child that was
killed or took too long. vLLM's own output goes to standard error.

Easy to get wrong: the parent forks, so it must have one thread only, and it must never change what a child changes (the
process group, vLLM's globals).
"""

import argparse
import contextlib
import gc
import json
import os
import resource
import selectors
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from typing import Any

# A load of 134,309 tensors takes less than 1 GiB; a weight that is really allocated takes far more than this.
CHILD_MEMORY_BYTES = 8 << 30


def main() -> None:
    """Serve jobs until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gpu")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--limit-seconds", type=float, default=1800)
    parser.add_argument("--cache", required=True, help="folder for what vLLM and transformers want to write")
    options = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what vLLM prints must not get into the answers
    _prepare(options.gpu, options.cache)
    _print(answers, {"ready": options.gpu})
    _serve(answers, options)


def _prepare(gpu_name: str, cache: str) -> None:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CACHE_ROOT": cache,
        "HF_MODULES_CACHE": cache,
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    from . import cuda, gpu

    gpu.install(cuda.DEVICES[gpu_name])
    # What every child would import.
    import vllm.engine.arg_utils
    import vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors
    import vllm.model_executor.layers.quantization.fp8
    import vllm.model_executor.layers.quantization.modelopt
    import vllm.model_executor.model_loader.default_loader
    import vllm.v1.spec_decode.llm_base_proposer
    import vllm.v1.worker.gpu.spec_decode.eagle.utils  # noqa: F401

    from . import stages  # noqa: F401

    gc.collect()
    gc.freeze()


@dataclass(slots=True, kw_only=True)
class _Child:
    pid: int
    number: int
    started: float
    received: bytearray


def _serve(answers: Any, options: argparse.Namespace) -> None:
    selector = selectors.DefaultSelector()
    selector.register(sys.stdin.fileno(), selectors.EVENT_READ, None)
    waiting: list[dict[str, Any]] = []
    children: dict[int, _Child] = {}
    pending, is_open = b"", True
    while is_open or waiting or children:
        while waiting and len(children) < options.workers:
            fd, child = _fork(waiting.pop(0), options.gpu, answers)
            children[fd] = child
            selector.register(fd, selectors.EVENT_READ, child)
        for key, _ in selector.select(timeout=1.0):
            chunk = os.read(key.fd, 1 << 20)
            if key.data is None:
                *lines, pending = (pending + chunk).split(b"\n")
                waiting += [json.loads(line) for line in lines if line.strip()]
                if not chunk:
                    is_open = False
                    selector.unregister(key.fd)
            elif chunk:
                key.data.received += chunk
            else:
                selector.unregister(key.fd)
                _finish(children.pop(key.fd), key.fd, answers)
        for child in children.values():
            if time.monotonic() - child.started > options.limit_seconds:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child.pid, signal.SIGKILL)


def _fork(job: dict[str, Any], gpu: str, answers: Any) -> tuple[int, _Child]:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        answers.close()
        os.close(reader)
        _child(job, gpu, writer)
    os.close(writer)
    return reader, _Child(pid=pid, number=job["id"], started=time.monotonic(), received=bytearray())


def _child(job: dict[str, Any], gpu: str, writer: int) -> None:
    """Load, answer, and leave without running the parent's exit handlers."""
    status = 1
    try:
        from .stages import Job, StagedLoad

        gc.disable()  # a load makes millions of objects and almost no cycles
        limit_memory(CHILD_MEMORY_BYTES)
        number = job.pop("id")
        account = StagedLoad(Job(**job), gpu=gpu).account()
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(json.dumps({"id": number, "account": account}, default=str).encode())
        status = 0
    except BaseException:  # noqa: BLE001  a fault of the dry load itself, for the log before the child is gone
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def limit_memory(num_bytes: int) -> None:
    """Let this process allocate `num_bytes` more; what wants more than that gets an error, and the machine goes on.

    Memory that is allocated and not touched counts: a weight that escapes the meta device is found before it is filled.
    """
    with open("/proc/self/statm") as file:
        data_pages = int(file.read().split()[5])
    limit = data_pages * resource.getpagesize() + num_bytes
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def _finish(child: _Child, fd: int, answers: Any) -> None:
    os.close(fd)
    _, status = os.waitpid(child.pid, 0)
    if child.received:
        answers.write(child.received.decode() + "\n")
    else:
        code = os.waitstatus_to_exitcode(status)
        died = f"killed by signal {-code}" if code < 0 else f"exit status {code}"
        _print(answers, {"id": child.number, "died": died})


def _print(answers: Any, value: dict[str, Any]) -> None:
    answers.write(json.dumps(value) + "\n")
