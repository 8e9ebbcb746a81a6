"""The process that loads: it imports vLLM once for a GPU, then forks a child for every checkpoint.

In: as arguments the GPU's name and a folder for what vLLM wants to write; on standard input a JSON
list of jobs a line.
Out: on standard output a JSON line for each job, in the order in which they end: {"id", "account"},
or {"id", "died"} for a child that was killed or took too long. vLLM's own output goes to standard
error.

Easy to get wrong: the parent forks, so it must have one thread only, and it must never change what
a child changes (the process group, vLLM's globals). A child writes its account to a file: a pipe is
too small for one.
"""

import gc
import importlib
import json
import logging
import os
import resource
import signal
import sys
import traceback
import types
from pathlib import Path
from typing import Any

# A load of 134,309 tensors takes less than 1 GiB; a weight that is really allocated takes far more
# than this.
CHILD_MEMORY_BYTES = 8 << 30
CHILD_SECONDS = 1800
START_SECONDS = 600
# A vLLM that prints without end gets an error, and the disk goes on.
FILE_BYTES = 256 << 20


def main() -> None:
    """Serve jobs until standard input ends."""
    gpu, cache = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what vLLM prints must not get into the answers
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
    signal.alarm(START_SECONDS)
    _prepare(gpu, cache)
    signal.alarm(0)
    for line in sys.stdin:
        waiting = json.loads(line)
        children = dict[int, int]()
        while waiting or children:
            while waiting and len(children) < (os.cpu_count() or 1):
                job = waiting.pop(0)
                children[_fork(job, gpu, cache)] = job["id"]
            pid, status = os.wait()
            number = children.pop(pid)
            written = Path(cache, f"{number}.json")
            if status:
                died = f"exit status {os.waitstatus_to_exitcode(status)}, a signal where negative"
                written.write_text(json.dumps({"id": number, "died": died}))
            answers.write(written.read_text() + "\n")
            written.unlink()


def _prepare(gpu_name: str, cache: str) -> None:
    gc.disable()  # 5,500 modules are made and none goes: a second of 14
    logging.disable(logging.WARNING)
    os.environ |= {
        # Else it sets the level of 340 loggers, one after the other, in every child.
        "VLLM_CONFIGURE_LOGGING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_LOGGING_CONFIG_PATH": "",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CACHE_ROOT": cache,
        "HF_MODULES_CACHE": cache,
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "KEEPMTP_CURES": "0",  # a job says which, also where keepmtp is installed, too
        # Else it looks 2,800 functions up before it finds that nothing can be compiled.
        "TORCHDYNAMO_DISABLE": "1",
        # Else FlashInfer's kernels count as missing on a machine without nvcc and ninja.
        "VLLM_HAS_FLASHINFER_CUBIN": "1",
        # A real humming starts compilers when it is imported, in every child.
        "HUMMING_DISABLE_PARALLEL_BUILD": "1",
    }
    from . import gpu

    gpu.install(gpu.DEVICES[gpu_name])
    # What every child would import.
    import vllm.compilation.backends
    import vllm.engine.arg_utils
    import vllm.v1.attention.backends.flex_attention
    import vllm.v1.attention.backends.turboquant_attn
    import vllm.v1.executor
    import vllm.v1.spec_decode.llm_base_proposer
    import vllm.v1.worker.gpu.spec_decode.eagle.utils  # noqa: F401
    from vllm.model_executor.layers.quantization import get_quantization_config
    from vllm.plugins import load_general_plugins

    from . import stages  # noqa: F401

    get_quantization_config("fp8")  # it imports the module of every method
    load_general_plugins()  # it reads what every installed package says of itself

    gc.freeze()


def _fork(job: dict[str, Any], gpu: str, cache: str) -> int:
    """Start a child that loads, answers, and leaves without running the parent's exit handlers."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        from .stages import StagedLoad

        signal.alarm(CHILD_SECONDS)
        limit_memory(CHILD_MEMORY_BYTES)
        number = job.pop("id")
        chosen = job.pop("cures")
        outcomes = dict[str, str]()
        if chosen:  # it is next to this package, and not installed here
            sys.path.insert(0, str(Path(__file__).parents[2]))
            package = importlib.import_module("keepmtp_cures")
            del sys.path[0]
            package.mend(chosen)
            outcomes = package.OUTCOMES
        account = StagedLoad(types.SimpleNamespace(**job), gpu=gpu).account()
        # Only now: most modules are imported, and so mended, while the model is built.
        account["load"]["cures"] = [name for name, why_not in outcomes.items() if not why_not]
        answer = json.dumps({"id": number, "account": account}, default=str)
        Path(cache, f"{number}.json").write_text(answer)
        status = 0
    except BaseException:  # noqa: BLE001  a fault of the dry load itself, for the log before the child is gone
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def limit_memory(num_bytes: int) -> None:
    """Let this process allocate `num_bytes` more; what wants more than that gets an error, and the
    machine goes on.

    Memory that is allocated and not touched counts: a weight that escapes the meta device is found
    before it is filled.
    """
    data_pages = int(Path("/proc/self/statm").read_text().split()[5])
    limit = data_pages * resource.getpagesize() + num_bytes
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
