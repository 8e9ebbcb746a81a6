"""vLLM's process: starts it, sends it checkpoints, and reads what it says of them.

In: checkpoints (folders), a GPU, a TP size, a number of drafts. Out: a `LoadAccount` each. The work
is done by validate/dryload/in_vllm in vLLM's own environment. There is one process for a GPU, and
it speaks JSON lines.

Easy to get wrong: nothing of vLLM is imported here. All jobs go out in one line before the first
answer is read, and the other side reads that line to its end before it answers: neither waits for
the other. vLLM's config classes read more files than config.json. And what answers may be a
stranger's vLLM: an answer has a form and a length.
"""

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from operator import attrgetter
from pathlib import Path

from pydantic import ValidationError

from ...checkpoints.dialects.choose import attention_backends
from ...checkpoints.fact import Fact
from ...checkpoints.files import ScratchFolder
from ...checkpoints.safetensors_file import lay_out
from ...checkpoints.source import SINGLE, Source, small_bytes
from ...quantize.run.child import Child, environment
from ...recipes.errors import VLLMError, first_fault
from ...recipes.frozen import Json, frozen
from ..facts.dry_load import GPU, DryLoad, LoadAccount, LoadedModel, LoadFailure
from ..facts.vllm_env import VLLM
from .versions import cache_folder

_FOLDER = Path(__file__).parent
_LAUNCH = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); from in_vllm.server import main; "
    "del sys.path[0]; main()"
)
_LOG_LINES = 6
_LOG_TAIL = 1 << 16  # bytes
_MOST_ANSWER = 1 << 27  # characters
# What vLLM's config classes read, config.json apart.
SMALL_FILES = (
    "hf_quant_config.json",
    "generation_config.json",
    "added_tokens.json",
    "preprocessor_config.json",
)


@frozen
class Job:
    """One checkpoint to load; `folder` comes from `headers_of`, `rank` is one of `tp` ranks,
    `method` is `Family.method`, and `cures` are switched on in vLLM (validate/keepmtp_cures). With
    `whole_experts` a rank has whole experts.
    """

    folder: Path
    tp: int = 1
    rank: int = 0
    whole_experts: bool = False
    num_drafts: int = 1
    method: str = "mtp"
    draft: Path | None = None
    cures: str = ""


class _Answer(Fact):
    """A line of vLLM's process: an account, or how the process of one was lost."""

    id: int
    account: LoadAccount | None = None
    died: str = ""


class DryLoader:
    """vLLM, imported once for one GPU; a context manager.

        with DryLoader(find_vllm(), gpu="sm100") as loader:
            (account,) = loader.load_all([Job(folder=folder, tp=4)])

    Raises:
        VLLMError: vLLM's process ends before it is ready.
    """

    def __init__(self, vllm: VLLM, *, gpu: GPU):
        """Start the process; it imports vLLM while the caller does something else.

        Args:
            vllm: the environment.
            gpu: the pretended GPU.
        """
        self.gpu: GPU = gpu
        self._vllm = vllm
        self._cache = ScratchFolder("keepmtp-dryload-")
        self._log = open(self._cache.path / "log", "w+", errors="replace")  # noqa: SIM115  closed on exit
        words = [vllm.python, "-c", _LAUNCH, _FOLDER, gpu, self._cache.path]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._log}
        first = environment(_first_on_path(vllm, self._cache.path))
        self._child = Child(words, environment=first, text=True, errors="replace", cwd="/", **pipes)
        self._process = self._child.process

    def __enter__(self) -> "DryLoader":
        return self

    def __exit__(self, *_: object) -> None:
        # at once: it holds nothing that has to be saved, and may still be importing
        self._child.end()
        self._log.close()
        self._cache.remove()

    def load_all(self, jobs: Sequence[Job]) -> list[LoadAccount]:
        """Several at the same time; the accounts come in the order of the jobs.

        The first rank may not read a tensor that another rank reads. So the other ranks load it
        too, before a tensor counts as unused.
        """
        accounts = self._load_ranks(jobs)
        for number, (job, account) in enumerate(zip(jobs, accounts, strict=True)):
            if job.tp > 1 and account.unconsumed and account.load.failure is None:
                others = self._load_ranks([replace(job, rank=rank) for rank in range(1, job.tp)])
                left = {*account.unconsumed}.intersection(*[each.unconsumed for each in others])
                accounts[number] = account.model_copy(update={"unconsumed": tuple(sorted(left))})
        return accounts

    def _load_ranks(self, jobs: Sequence[Job]) -> list[LoadAccount]:
        assert self._process.stdin is not None
        accounts: dict[int, LoadAccount] = {}
        own = {"vllm": self._vllm.version}
        orders = list[Json]()
        for number, job in enumerate(jobs):
            config = {}
            file = job.folder / "config.json"
            if file.is_file():  # else vLLM says what is missing
                config = json.loads(file.read_bytes())
            backend = attention_backends(config).get(self.gpu, "")
            chosen = {"id": number, "attention": backend}
            orders.append(chosen | own | asdict(job))
        # Absolute, as vLLM's process runs in another folder.
        line = json.dumps(orders, default=os.path.abspath)
        with suppress(BrokenPipeError):  # then nothing can be read either
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        while len(accounts) < len(jobs):
            answer = self._answer()
            if answer.id not in range(len(jobs)) or answer.id in accounts:
                raise self._refused(f"an answer to job {answer.id}, which nobody asked for")
            account = answer.account
            if account is None:  # the process of this checkpoint was killed or took too long
                job = jobs[answer.id]
                words = f"the process that judged it was lost ({answer.died}): {self._last_words()}"
                failure = LoadFailure(stage="crash", role="", type="", words=words)
                place = {"gpu": self.gpu, "tp": job.tp, "k": job.num_drafts, "failure": failure}
                load = DryLoad(**own, **place, ok=False, target=LoadedModel(), draft=LoadedModel())
                account = LoadAccount(path=str(job.folder), load=load)
            accounts[answer.id] = account
        return [accounts[number] for number in range(len(jobs))]

    def _answer(self) -> _Answer:
        """The next line of vLLM's process, where its start and each load have a time limit
        (in_vllm/server.py).

        Raises:
            VLLMError: no line, or none that `in_vllm` writes.
        """
        assert self._process.stdout is not None
        try:
            line = self._process.stdout.readline(_MOST_ANSWER)
            if not line:
                words = self._last_words().rpartition(" | ")[2]
                raise self._refused(words or f"exit status {self._process.wait()}")
            return _Answer.model_validate_json(line)
        except ValidationError as error:
            raise self._refused(f"an answer that is none: {first_fault(error)}") from error

    def _refused(self, got: str) -> VLLMError:
        cure = "Run `keepmtp doctor`; versions that were tested are in constraints-vllm.txt"
        if self._vllm.site:
            cure = (
                f"It ran over torch {self._vllm.torch} and transformers {self._vllm.transformers} "
                "of that environment: if they do not fit, set VLLM_PYTHON to one made for vLLM "
                f"{self._vllm.version}"
            )
        rule = f"vLLM {self._vllm.version} must build models for a pretended {self.gpu}"
        return VLLMError(self._vllm.python, rule, got=got, cure=cure)

    def _last_words(self) -> str:
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - _LOG_TAIL))
        lines = [line.strip() for line in self._log if "nanobind" not in line]
        return " | ".join([*filter(None, lines)][-_LOG_LINES:])


def _first_on_path(vllm: VLLM, folder: Path) -> dict[str, str]:
    """Variables that put the `vllm` of a site before the installed one, and nothing else of that
    folder: an image's PyTorch was built for its own Python.

    importlib.metadata finds the site's version too. Nothing is written into a site that may be
    somebody's.
    """
    if vllm.site is None:
        return {}
    if vllm.site.parent == cache_folder():  # ours: its bytecode stays, two of 18 seconds
        return {"PYTHONPATH": str(vllm.site)}
    place = folder / "site-packages"
    info = place / f"vllm-{vllm.version}.dist-info"
    info.mkdir(parents=True)
    metadata = f"Metadata-Version: 2.1\nName: vllm\nVersion: {vllm.version}\n"
    (info / "METADATA").write_text(metadata)
    (place / "vllm").symlink_to(vllm.site / "vllm", target_is_directory=True)
    return {"PYTHONPATH": str(place), "PYTHONDONTWRITEBYTECODE": "1"}


@contextmanager
def headers_of(source: Source) -> Iterator[Path]:
    """A folder that vLLM can read `source` from."""
    if source.folder is not None and not source.changed:
        yield source.folder
        return
    with ScratchFolder("keepmtp-headers-") as folder:
        (folder / "config.json").write_text(json.dumps(source.config))
        for name in SMALL_FILES:
            data = small_bytes(source, name)
            if data is not None:
                (folder / name).write_bytes(data)
        # In vLLM's order: by file, then as they lie.
        entries = sorted(source.entries.values(), key=attrgetter("file", "start"))
        layout = lay_out([(entry.name, entry.dtype, entry.shape) for entry in entries])
        with open(folder / SINGLE, "wb") as written:
            written.write(layout.header)
            written.truncate(layout.num_bytes)  # a hole: no data is read
        yield folder
