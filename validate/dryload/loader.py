"""The dry load, seen from keepmtp's side: vLLM's verdict on a checkpoint for a GPU that is not there.

In: checkpoints (folders, or Hub repositories by their headers), a GPU, a TP size, a number of drafts. Out: `Verdict`s.
The work is done by validate/dryload/in_vllm in vLLM's own environment, one process for a GPU, reached by JSON lines.

Easy to get wrong: nothing of vLLM is imported here, and a checkpoint from the Hub is not downloaded: vLLM reads files
that have its headers, and holes where the weights would be.
"""

import contextlib
import json
import struct
import subprocess
import tempfile
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, get_args

from ...checkpoints.safetensors_file import Entry
from ...checkpoints.source import INDEX, SINGLE, Source, small_file
from ...recipes.errors import VLLMError
from ..serving.vllm_env import VLLM

GPU = Literal["sm90", "sm100", "sm120"]
GPUS: tuple[GPU, ...] = get_args(GPU)
# What vLLM's config classes read beside config.json.
SMALL_FILES = ("hf_quant_config.json", "generation_config.json", "added_tokens.json", "preprocessor_config.json")
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
class Fault:
    """A runtime parameter that was not written over all its elements.

    Attributes:
        param: its name in vLLM.
        num_written, num_expected: elements.
        dtype: the parameter's.
        sources: the tensors on disk that it was written from, each with the elements written.
    """

    param: str
    num_written: int
    num_expected: int
    dtype: str
    sources: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Misfit:
    """A write that changed what it wrote: numbers cast between packed and wide formats, or one value spread over many.

    Attributes:
        param: the parameter's name in vLLM.
        tensor: the tensors on disk, comma-separated.
        given, wanted: dtype or shape on disk, and that of the parameter.
    """

    param: str
    tensor: str
    given: str
    wanted: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a quantization config was asked at construction, and its answer ("" for none).

    Attributes:
        prefix: the name it was asked about.
        layer: class of the layer; `path`: where the layer stands in the model, which parameters are named after.
    """

    prefix: str
    layer: str
    method: str
    scheme: str
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """Layers of one kind and what vLLM would run them with.

    Attributes:
        layer, method, kernel: classes, or names of back-ends.
        count: layers.
        where: prefix of the first.
        outcome: "ok", "refused: ...", or "not judged: ..." where values or compiled operators decide.
    """

    layer: str
    method: str
    kernel: str
    count: int
    where: str
    outcome: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """The target or the draft.

    Attributes:
        cls: vLLM's class; "" if it was not reached.
        num_params: parameters that a checkpoint must fill; num_written: those that it did.
        unwritten: uninitialised memory; default: construction's value; partial: filled in part.
        padded: filled as far as the checkpoint goes, the rest is padding on purpose.
        shared: parameters that vLLM replaces by the target's after loading.
    """

    cls: str = ""
    num_params: int = 0
    num_written: int = 0
    unwritten: tuple[Fault, ...] = ()
    default: tuple[Fault, ...] = ()
    partial: tuple[Fault, ...] = ()
    padded: tuple[Fault, ...] = ()
    casts: tuple[Misfit, ...] = ()
    broadcasts: tuple[Misfit, ...] = ()
    shared: tuple[str, ...] = ()
    asked: tuple[Question, ...] = ()
    kernels: tuple[Kernel, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """vLLM's exception.

    Attributes:
        stage: config, world, construct, load, share or process; "crash" if the process died.
        role: target, draft or "".
        type, words, at: the exception's class, message, and file:line in vLLM.
        tensor: the tensor on disk that the loader had in hand; "" outside loading.
    """

    stage: str
    role: str
    type: str
    words: str
    at: str = ""
    tensor: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What vLLM did with one checkpoint on one pretended GPU.

    Attributes:
        runner: vLLM's model runner, v1 or v2.
        unconsumed: tensors on disk that neither target nor draft used.
        truncated: (tensor, elements used, elements) of those used in part; only told at TP 1.
        seconds: by stage; peak_mib: of the process that judged.
    """

    path: str
    gpu: GPU
    tp: int
    num_drafts: int
    failure: Failure | None
    target: Side
    draft: Side
    unconsumed: tuple[str, ...] = ()
    truncated: tuple[tuple[str, int, int], ...] = ()
    runner: str = ""
    quant_config: str = ""
    seconds: dict[str, float]
    peak_mib: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One checkpoint to judge; `folder` as `headers_of` gives it, `rank` of `tp` ranks."""

    folder: Path
    tp: int = 1
    rank: int = 0
    num_drafts: int = 1
    draft: Path | None = None


class DryLoader:
    """vLLM, imported once for one GPU; a context manager.

        with DryLoader(find_vllm(), gpu="sm100") as loader:
            verdict = loader.judge(folder, tp=4)

    Raises:
        VLLMError: vLLM's process ends before it is ready.
    """

    def __init__(self, vllm: VLLM, *, gpu: GPU, workers: int | None = None):
        """Start the process; it imports vLLM while the caller does something else.

        Args:
            vllm: the environment.
            gpu: the pretended GPU.
            workers: checkpoints judged side by side; default one a core.
        """
        self.gpu: GPU = gpu
        self._vllm = vllm
        self._cache = tempfile.TemporaryDirectory(prefix="keepmtp-dryload-")
        self._log = open(Path(self._cache.name) / "log", "w+", errors="replace")  # noqa: SIM115  closed on exit
        words = [str(vllm.python), "-c", _LAUNCH, str(_PACKAGE), gpu, "--cache", self._cache.name]
        words += ["--workers", str(workers)] if workers else []
        self._process = subprocess.Popen(  # noqa: S603  the user's own vLLM
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True
        )

    def __enter__(self) -> "DryLoader":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self._process.kill()  # it holds nothing that has to be saved, and may still be importing
        self._process.communicate()
        self._log.close()
        self._cache.cleanup()

    def judge(self, folder: Path, *, tp: int = 1, num_drafts: int = 1) -> Verdict:
        """One checkpoint."""
        return self.judge_all([Job(folder=folder, tp=tp, num_drafts=num_drafts)])[0]

    def judge_all(self, jobs: Sequence[Job], *, done: Callable[[Verdict], None] | None = None) -> list[Verdict]:
        """Several, side by side; verdicts come back in the jobs' order, `done` hears of each as it ends.

        A tensor that the first rank leaves alone may be another rank's: those are asked before it counts as unused.
        """
        verdicts = self._judge_ranks(jobs, done)
        for number, (job, verdict) in enumerate(zip(jobs, verdicts, strict=True)):
            if job.tp > 1 and verdict.unconsumed and verdict.failure is None:
                others = self._judge_ranks([replace(job, rank=rank) for rank in range(1, job.tp)], None)
                left = set(verdict.unconsumed).intersection(*(set(other.unconsumed) for other in others))
                verdicts[number] = replace(verdict, unconsumed=tuple(sorted(left)))
        return verdicts

    def _judge_ranks(self, jobs: Sequence[Job], done: Callable[[Verdict], None] | None) -> list[Verdict]:
        verdicts: dict[int, Verdict] = {}
        waiting = deque(enumerate(jobs))
        while len(verdicts) < len(jobs):
            # Few jobs at a time: both pipes are small, and neither side may wait for the other.
            while waiting and len(jobs) - len(waiting) - len(verdicts) < _JOBS_AHEAD:
                self._send(*waiting.popleft())
            answer = self._receive()
            if "ready" not in answer:
                verdict = _verdict(answer, jobs[answer["id"]], self.gpu, self._last_words)
                verdicts[answer["id"]] = verdict
                if done is not None:
                    done(verdict)
        return [verdicts[number] for number in range(len(jobs))]

    def _send(self, number: int, job: Job) -> None:
        assert self._process.stdin is not None
        told = {
            "id": number,
            "path": str(job.folder),
            "tp": job.tp,
            "rank": job.rank,
            "num_drafts": job.num_drafts,
            "draft": str(job.draft or ""),
        }
        try:
            self._process.stdin.write(json.dumps(told) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._refuse_death()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._refuse_death()
        return json.loads(line)

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


@contextlib.contextmanager
def headers_of(source: Source) -> Iterator[Path]:
    """A folder that vLLM can read `source` from: its own, or for a Hub repository its headers over holes."""
    if source.folder is not None:
        yield source.folder
        return
    with tempfile.TemporaryDirectory(prefix="keepmtp-headers-") as scratch:
        folder = Path(scratch)
        (folder / "config.json").write_text(json.dumps(source.config))
        for name in SMALL_FILES:
            if (path := small_file(source, name)) is not None:
                (folder / name).write_bytes(path.read_bytes())
        files: dict[str, list[Entry]] = defaultdict(list)
        for entry in source.entries.values():
            files[entry.file].append(entry)
        for file, entries in files.items():
            _write_headers(folder / file, entries)
        if set(files) != {SINGLE}:
            weight_map = {entry.name: entry.file for entry in source.entries.values()}
            (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        yield folder


def _write_headers(path: Path, entries: Iterable[Entry]) -> None:
    header: dict[str, Any] = {}
    end = 0
    for entry in sorted(entries, key=lambda entry: entry.start):
        header[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [end, end + entry.num_bytes],
        }
        end += entry.num_bytes
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(8 + len(raw) + end)


def _verdict(answer: dict[str, Any], job: Job, gpu: GPU, last_words: Callable[[], str]) -> Verdict:
    if "died" in answer:
        words = f"the process that judged it was lost ({answer['died']}): {last_words()}"
        answer = {"failure": {"stage": "crash", "role": "", "type": "", "words": words}, "target": {}, "draft": {}}
    failure = answer["failure"]
    return Verdict(
        path=str(job.folder),
        gpu=gpu,
        tp=job.tp,
        num_drafts=job.num_drafts,
        failure=Failure(**failure) if failure else None,
        target=_side(answer["target"]),
        draft=_side(answer["draft"]),
        unconsumed=tuple(answer.get("unconsumed", ())),
        truncated=tuple((name, used, size) for name, used, size in answer.get("truncated", ())),
        runner=answer.get("runner", ""),
        quant_config=answer.get("quant_config", ""),
        seconds=answer.get("seconds", {}),
        peak_mib=answer.get("peak_mib", 0),
    )


def _side(told: dict[str, Any]) -> Side:
    def faults(key: str) -> tuple[Fault, ...]:
        fields = ("param", "num_written", "num_expected", "dtype", "sources")
        return tuple(Fault(**dict(zip(fields, row, strict=True))) for row in told.get(key, ()))

    def misfits(key: str) -> tuple[Misfit, ...]:
        fields = ("param", "tensor", "given", "wanted")
        return tuple(Misfit(**dict(zip(fields, row, strict=True))) for row in told.get(key, ()))

    answers = ("prefix", "layer", "method", "scheme", "path")
    questions = (dict(zip(answers, row, strict=True)) for row in told.get("asked", ()))
    return Side(
        cls=told.get("cls", ""),
        num_params=told.get("num_params", 0),
        num_written=told.get("num_written", 0),
        unwritten=faults("unwritten"),
        default=faults("default"),
        partial=faults("partial"),
        padded=faults("padded"),
        casts=misfits("casts"),
        broadcasts=misfits("broadcasts"),
        shared=tuple(told.get("shared", ())),
        asked=tuple(Question(**question) for question in questions),
        kernels=tuple(Kernel(**kernel) for kernel in told.get("kernels", ())),
    )
