"""vLLM's process: starts it, sends it checkpoints, and reads what it says of them.

In: checkpoints (folders), a GPU, a TP size, a number of drafts. Out: a `LoadAccount` each. The work is done by
validate/dryload/in_vllm in vLLM's own environment. There is one process for a GPU, and it speaks JSON lines.

Easy to get wrong: nothing of vLLM is imported here. Each line is parsed once, into the models of facts.py.
"""

import json
import subprocess
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

from ...checkpoints.fact import Fact
from ...checkpoints.scratch import ScratchFolder
from ...recipes.errors import VLLMError
from ..facts.child import Child, environment
from ..facts.dry_load import GPU, DryLoad, LoadAccount, LoadedModel, LoadFailure
from ..facts.vllm_env import VLLM

_PACKAGE = Path(__file__).parent / "in_vllm"
_LAUNCH = (
    "import importlib.util as u, sys; p = sys.argv.pop(1); "
    "s = u.spec_from_file_location('dryload', p + '/__init__.py', submodule_search_locations=[p]); "
    "m = sys.modules['dryload'] = u.module_from_spec(s); s.loader.exec_module(m); "
    "from dryload.server import main; main()"
)
_LOG_LINES = 6
_JOBS_AHEAD = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One checkpoint to load; `folder` comes from `headers_of`, `rank` is one of `tp` ranks."""

    folder: Path
    tp: int = 1
    rank: int = 0
    num_drafts: int = 1
    draft: Path | None = None


class _Line(Fact):
    """A line of vLLM's process: the GPU when it is ready, then an account, or how the process of one was lost."""

    ready: str = ""
    id: int = -1
    account: LoadAccount | None = None
    died: str = ""


class DryLoader:
    """vLLM, imported once for one GPU; a context manager.

        with DryLoader(find_vllm(), gpu="sm100") as loader:
            account = loader.load(folder, tp=4)

    Raises:
        VLLMError: vLLM's process ends before it is ready.
    """

    def __init__(self, vllm: VLLM, *, gpu: GPU, workers: int | None = None):
        """Start the process; it imports vLLM while the caller does something else.

        Args:
            vllm: the environment.
            gpu: the pretended GPU.
            workers: checkpoints that are loaded at the same time; default one a core.
        """
        self.gpu: GPU = gpu
        self._vllm = vllm
        self._cache = ScratchFolder("keepmtp-dryload-")
        self._log = open(self._cache.path / "log", "w+", errors="replace")  # noqa: SIM115  closed on exit
        words = [str(vllm.python), "-c", _LAUNCH, str(_PACKAGE), gpu, "--cache", str(self._cache.path)]
        words += ["--workers", str(workers)] if workers else []
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._log, "text": True, "cwd": "/"}
        self._child = Child(words, environment=environment(), **pipes)
        self._process = self._child.process

    def __enter__(self) -> "DryLoader":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self._child.end()  # at once: it holds nothing that has to be saved, and may still be importing
        self._log.close()
        self._cache.remove()

    def load(self, folder: Path, *, tp: int = 1, num_drafts: int = 1) -> LoadAccount:
        """One checkpoint."""
        return self.load_all([Job(folder=folder, tp=tp, num_drafts=num_drafts)])[0]

    def load_all(self, jobs: Sequence[Job]) -> list[LoadAccount]:
        """Several at the same time; the accounts come in the order of the jobs.

        The first rank may not read a tensor that another rank reads. So the other ranks load it too, before a tensor
        counts as unused.
        """
        accounts = self._load_ranks(jobs)
        for number, (job, account) in enumerate(zip(jobs, accounts, strict=True)):
            if job.tp > 1 and account.unconsumed and account.load.failure is None:
                others = self._load_ranks([replace(job, rank=rank) for rank in range(1, job.tp)])
                left = set(account.unconsumed).intersection(*(set(other.unconsumed) for other in others))
                accounts[number] = account.model_copy(update={"unconsumed": tuple(sorted(left))})
        return accounts

    def _load_ranks(self, jobs: Sequence[Job]) -> list[LoadAccount]:
        accounts: dict[int, LoadAccount] = {}
        waiting = deque(enumerate(jobs))
        while len(accounts) < len(jobs):
            # Few jobs at a time: both pipes are small, and neither side may wait for the other.
            while waiting and len(jobs) - len(waiting) - len(accounts) < _JOBS_AHEAD:
                self._send(*waiting.popleft())
            line = self._receive()
            if not line.ready:
                accounts[line.id] = line.account or self._lost(jobs[line.id], line.died)
        return [accounts[number] for number in range(len(jobs))]

    def _send(self, number: int, job: Job) -> None:
        assert self._process.stdin is not None
        line = {
            "id": number,
            "path": str(job.folder.absolute()),
            "tp": job.tp,
            "rank": job.rank,
            "num_drafts": job.num_drafts,
            "draft": str(job.draft.absolute() if job.draft else ""),
        }
        try:
            self._process.stdin.write(json.dumps(line) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._refuse_death()

    def _receive(self) -> _Line:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._refuse_death()
        return _Line.model_validate_json(line)

    def _lost(self, job: Job, died: str) -> LoadAccount:
        """The account of a checkpoint whose process was killed or took too long."""
        words = f"the process that judged it was lost ({died}): {self._last_words()}"
        load = DryLoad(
            gpu=self.gpu,
            tp=job.tp,
            k=job.num_drafts,
            ok=False,
            failure=LoadFailure(stage="crash", role="", type="", words=words),
            target=LoadedModel(),
            draft=LoadedModel(),
        )
        return LoadAccount(path=str(job.folder), load=load)

    def _refuse_death(self) -> None:
        self._process.wait()
        raise VLLMError(
            self._vllm.python,
            f"vLLM {self._vllm.version} must build models for a pretended {self.gpu}",
            got=self._last_words() or f"exit status {self._process.returncode}",
            cure="Run `keepmtp doctor`; versions that were tested are in constraints-vllm.txt",
        )

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = [line.strip() for line in self._log if line.strip() and "nanobind" not in line]
        return " | ".join(lines[-_LOG_LINES:])
