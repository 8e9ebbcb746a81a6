"""Starts every child process of keepmtp: vLLM's servers, the dry load, questions to another Python,
stations.

In: the child's words, and whether it may reach the Hub. Out: a `Child`, which ends with its context
and with keepmtp, by whatever signal, and takes its own children with it
(quantize/run/supervisor.py).

Easy to get wrong: a checkpoint may bring code, and the current folder may be a stranger's. So a
child that stays offline gets of the environment what `_LISTED` names and no secret, and no child
imports from the current folder.
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

_SUPERVISOR = Path(__file__).with_name("supervisor.py")
# They belong to keepmtp's Python.
_OURS = ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV")
# What vLLM, its libraries, compilers and GPUs read. A star is the rest of a name.
_LISTED = """
    PATH HOME USER LOGNAME SHELL HOSTNAME PWD TERM COLUMNS NO_COLOR TZ LANG LANGUAGE LC_* XDG_*
    TMPDIR TEMP TMP CONDA_PREFIX VIRTUAL_ENV PYTHON* KEEPMTP_*
    LD_* LIBRARY_PATH CPATH C_INCLUDE_PATH CPLUS_INCLUDE_PATH CC CXX
    SSL_CERT_FILE SSL_CERT_DIR HTTP_PROXY HTTPS_PROXY ALL_PROXY NO_PROXY
    VLLM_* RAY_* HF_* HUGGINGFACE_* TRANSFORMERS_* TOKENIZERS_* SAFETENSORS_* RAYON_*
    TORCH* PYTORCH_* TRITON_* FLASHINFER_* FLASH_ATTN* AITER_* DG_* TVM_* TILELANG_* CUTE_*
    CUDA* NVIDIA_* NCCL_* NVSHMEM_* NVTE_* CUBLAS* CUDNN_* CUTLASS_*
    ROCM_* ROCR_* HIP_* HSA_* GPU_* AMD_* RCCL_* MIOPEN_* ONEAPI_* ZE_* CCL_*
    GLOO_* TP_SOCKET_IFNAME UCX_* FI_* MASTER_ADDR MASTER_PORT
    OMP_* GOMP_* KMP_* MKL_* OPENBLAS_* NUMEXPR_* DNNL_* ONEDNN_* MALLOC_*
"""
_KEPT = re.compile("|".join(_LISTED.split()).replace("*", r"\w*"), re.IGNORECASE)
_SECRET = re.compile(
    r"(?:TOKEN|SECRET|PASS|PASSWORD|PAT|CREDENTIALS|KEY|HF_OIDC_RESOURCE)$", re.IGNORECASE
)
_LOGIN = re.compile("://[^/]*@")
_OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
    "HF_TOKEN_PATH": os.devnull,
}


def environment(
    changes: Mapping[str, str] = MappingProxyType({}),
    *,
    reaches_hub: bool = False,
    is_ours: bool = False,
) -> dict[str, str]:
    """The environment of a child.

    Args:
        changes: further variables.
        reaches_hub: it may load from the Hub, with the user's token, and gets everything. Any
            other child gets what is listed and no secret, and stays offline.
        is_ours: it runs keepmtp's own Python.
    """
    kept = {}
    for name, value in os.environ.items():
        if name in _OURS and not is_ours:
            continue
        if reaches_hub or _is_harmless(name, value):
            kept[name] = value
    if not reaches_hub:
        kept |= _OFFLINE
    return {**kept, "PYTHONSAFEPATH": "1", **changes}


def _is_harmless(name: str, value: str) -> bool:
    """Listed, by name no secret, and no address with a password."""
    is_secret = _SECRET.search(name) or _LOGIN.search(value)
    return bool(_KEPT.fullmatch(name)) and not is_secret


class Child:
    """A running child; a context manager.

    Attributes:
        process: its supervisor, which leads a session of its own and ends as the child does, with
            the same status.
    """

    def __init__(
        self,
        words: Sequence[str | Path],
        *,
        environment: Mapping[str, str],
        grace_seconds: float = 0.0,
        **pipes: Any,
    ):
        """Start it.

        Args:
            words: an executable and its arguments.
            environment: from `environment`.
            grace_seconds: how long it may take to end after SIGTERM, before it and its descendants
                are killed.
            pipes: `stdin`, `stdout`, `stderr`, `text`, `cwd` of `subprocess.Popen`; without a
                `stdin` it reads nothing.
        """
        self._grace_seconds = grace_seconds
        lifeline, self._writer = os.pipe()
        try:
            self.process: subprocess.Popen[Any] = subprocess.Popen(  # noqa: S603 - the words are ours and the user's own
                [sys.executable, "-I", "-S", str(_SUPERVISOR), str(lifeline), *map(str, words)],
                env=environment,
                start_new_session=True,
                pass_fds=(lifeline,),
                **{"stdin": subprocess.DEVNULL, **pipes},
            )
        except OSError:
            os.close(self._writer)
            raise
        finally:
            os.close(lifeline)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """End it and all of its descendants: asked first, then by force, also if Ctrl-C is pressed
        again.
        """
        if self._writer < 0:
            return
        try:
            if self._grace_seconds and self.process.poll() is None:
                self.process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    self.process.wait(timeout=self._grace_seconds)
        finally:
            os.close(self._writer)  # its supervisor then kills what is left
            self._writer = -1
            if self.process.wait() == -signal.SIGKILL:
                self.kill()  # it may have been killed itself, before it could end the others
            for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
                if pipe is not None:
                    with suppress(BrokenPipeError):
                        pipe.close()

    def kill(self) -> None:
        """Kill its group at once, also from another thread; who reads its pipes reads their end."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


def answer(words: Sequence[str | Path], *, environment: Mapping[str, str], timeout: float) -> str:
    """What a child prints. It is started in the root folder, where nothing of a stranger can be
    imported.

    Raises:
        OSError: it cannot be started.
        subprocess.CalledProcessError: it failed.
        subprocess.TimeoutExpired: it was still running after `timeout` seconds.
    """
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": "/"}
    with Child(words, environment=environment, **pipes) as child:
        said, complained = child.process.communicate(timeout=timeout)
    if child.process.returncode:
        raise subprocess.CalledProcessError(
            child.process.returncode, list(map(str, words)), said, complained
        )
    return said
