"""`make gpu-serve`: what keepmtp makes, served on this machine by a real vLLM, in steps of growing
worth.

In: a GPU or --device cpu, and the environments of this checkout. Out: rows, printed and put into the page's table as they come, so that a cut loses one step;
what servers and commands said, in a file beside the page. Exit status 1 if a row is not as expected,
2 if the run cannot begin.

Each step is a process of its own with a time limit, and one that fails does not stop the next. The
first is tried alone, since ten first servers at once wait minutes for each other; then several at a
time, where a GPU has room; what is timed is alone again.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import torch
from figures import Figure, failed, line

HERE = Path(__file__)
ROOT = HERE.parent.parent
sys.path.insert(0, str(ROOT / "tests" / "helpers"))
PAGE = ROOT / "docs" / "gpu.md"
BEGIN, END = "<!-- begin: written by make gpu-serve -->\n", "<!-- end: gpu-serve -->\n"
HEAD = ("step", "what", "measured", "expected", "met", "on")
TIMED = ("bench", "mimo-7b")
_KEY = 2  # columns that name a row, with the last one


def main() -> None:
    """Run the steps, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true", help="Few tokens, one small model.")
    parser.add_argument("--only", action="append", default=[], help="A step; several if repeated.")
    parser.add_argument("--from", dest="start", help="The step to begin with.")
    parser.add_argument("--list", action="store_true", help="Print the steps and stop.")
    parser.add_argument("--folder", type=Path, help="For checkpoints, results and logs.")
    parser.add_argument("--page", type=Path, help="The page with the table; docs/gpu.md on a GPU.")
    parser.add_argument("--step-seconds", type=float, help="120; on a CPU 900.")
    parser.add_argument("--start-seconds", type=float, help="For a server: 90; on a CPU 600.")
    parser.add_argument("--at-once", type=int, default=4, help="Variants served at a time.")
    parser.add_argument("--graphs", action="store_true", help="Serve without --enforce-eager.")
    parser.add_argument("--attention-backend", help="FLASH_ATTN, TRITON_ATTN; vLLM's choice.")
    parser.add_argument("--step", help=argparse.SUPPRESS)
    parser.add_argument("words", nargs="*", help="Further words for every vllm serve.")
    chosen = parser.parse_args()
    is_cpu = chosen.device == "cpu"
    chosen.step_seconds = chosen.step_seconds or (120, 900)[is_cpu]
    chosen.start_seconds = chosen.start_seconds or (90, 600)[is_cpu]
    sys.exit(run(chosen))


def run(chosen: argparse.Namespace) -> int:
    """What `main` was asked for; the exit status."""
    from gpu_steps import NOT_SMALL, Options, slug, steps

    if chosen.device == "cuda" and not torch.cuda.is_available():
        print(
            f"error: gpu-serve: PyTorch must see a GPU; got PyTorch {torch.__version__} without one. "
            "Run it on a machine with a GPU, or try the program itself with make gpu-serve "
            "DEVICE=cpu SMALL=1.",
            file=sys.stderr,
        )
        return 2
    folder = chosen.folder or Path(tempfile.gettempdir()) / "keepmtp-gpu-serve"
    folder.mkdir(parents=True, exist_ok=True)
    options = Options(
        device=chosen.device,
        small=chosen.small,
        folder=folder.resolve(),
        served=folder.resolve() / "served" / slug(chosen.step or "none"),
        sm=architecture(chosen.device),
        words=words_for_vllm(chosen),
        start_seconds=chosen.start_seconds,
    )
    known = steps(options)
    if chosen.step:
        os.environ.setdefault("VLLM_DEEP_GEMM_WARMUP", "skip")
        # FlashInfer's sampler is compiled at the first start, and not every machine can.
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
        # Half a minute sooner than a second import; vLLM takes spawn where it must.
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "fork")
        shutil.rmtree(options.served, ignore_errors=True)
        for figure in known[chosen.step](options):
            print(json.dumps(asdict(replace(figure, part=chosen.step))), flush=True)
        return 0
    names = [*known]
    if unknown := {*chosen.only, *filter(None, [chosen.start])} - {*names}:
        print(
            f"error: gpu-serve: a step must be one of `make gpu-serve LIST=1`; got "
            f"{', '.join(sorted(unknown))}. Name one of them.",
            file=sys.stderr,
        )
        return 2
    if chosen.only:
        names = [name for name in names if name in chosen.only]
    if chosen.start:
        names = names[names.index(chosen.start) :]
    if chosen.small:
        print(f"--small leaves out: {'; '.join(NOT_SMALL)}", file=sys.stderr, flush=True)
    if chosen.list:
        print("\n".join(names))
        return 0
    return Run(chosen, options.folder, slug).all(names)


def architecture(device: str) -> str:
    """What `keepmtp check --gpu` pretends: this GPU; for a CPU, an H100."""
    if device == "cpu":
        return "sm90"
    major, minor = torch.cuda.get_device_capability()
    return f"sm{major}{minor}"


def words_for_vllm(chosen: argparse.Namespace) -> tuple[str, ...]:
    """What every server gets. In one process a server starts sooner."""
    words = [] if chosen.graphs else ["--enforce-eager"]
    if "GPU_KIT" in os.environ:  # without flashinfer
        words += ["--gdn-prefill-backend", "triton"]
    if chosen.device == "cpu":
        executor = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
        words = ["--distributed-executor-backend", executor]
    if chosen.attention_backend:
        words += ["--attention-backend", chosen.attention_backend]
    return *words, *chosen.words


class Run:
    """The steps of one run. State: the rows so far, and the file that servers' words go to."""

    def __init__(self, chosen: argparse.Namespace, folder: Path, slug: Callable[[str], str]):
        self._chosen = chosen
        self._page = chosen.page
        if not chosen.page and chosen.device == "cuda" and not chosen.small:
            self._page = PAGE
        if self._page and not self._page.exists():
            self._page.write_bytes(PAGE.read_bytes())
        self._said = self._page.with_suffix(".log") if self._page else folder / "gpu-serve.log"
        self._on = where(chosen.device)
        self._lock = threading.Lock()
        self._is_met = True
        self._folder, self._slug = folder, slug

    def all(self, names: list[str]) -> int:
        """Run them; 1 if a row is not as expected."""
        print(f"{self._on}; what is said goes to {self._said}", flush=True)
        several = [name for name in names if not name.startswith(TIMED)]
        if not self._chosen.start:  # after a cut the first has been served alone before
            several = several[1:]
        at_once = self._chosen.at_once if self._chosen.device == "cuda" else 1
        waiting = [*names]
        while waiting:
            group = [waiting.pop(0)]
            while group[0] in several and waiting and waiting[0] in several:
                group.append(waiting.pop(0))
            with ThreadPoolExecutor(at_once) as pool:
                for _ in pool.map(self._step, group):
                    pass
        return int(not self._is_met)

    def _step(self, name: str) -> None:
        for figure in self._figures(name):
            with self._lock:
                self._is_met &= figure.met
                print(line(figure), flush=True)
                if self._page:
                    put_row(self._page, (*row(figure), self._on))

    def _figures(self, name: str) -> Iterator[Figure]:
        """Rows of a step in a process of its own, which takes its servers with it when it ends."""
        words = [sys.executable, "-P", str(HERE), *sys.argv[1:], "--step", name]
        if "--" in sys.argv:
            at = sys.argv.index("--")
            words = [
                sys.executable,
                "-P",
                str(HERE),
                *sys.argv[1:at],
                "--step",
                name,
                *sys.argv[at:],
            ]
        limit = self._chosen.step_seconds
        errors = self._folder / f"{self._slug(name)}.said"
        environment = os.environ | {"PYTHONPATH": f"{HERE.parent}:{ROOT / 'tests' / 'helpers'}"}
        with (
            open(errors, "w") as said,
            subprocess.Popen(
                words, stdout=subprocess.PIPE, stderr=said, text=True, env=environment
            ) as child,
        ):
            assert child.stdout is not None
            is_late = threading.Event()

            def end() -> None:
                is_late.set()
                child.terminate()

            timer = threading.Timer(limit, end)
            timer.start()
            for told in child.stdout:
                if told.startswith("{"):
                    yield Figure(**json.loads(told))
            child.wait()
            timer.cancel()
        self._keep_words(name, errors)
        if is_late.is_set():
            yield failed(name, f"cut after {limit:.0f} s")
        elif child.returncode:
            last = errors.read_text().strip().splitlines()[-1:]
            yield failed(name, " ".join(last)[:300] or f"exit status {child.returncode}")

    def _keep_words(self, name: str, errors: Path) -> None:
        """What the step and its servers said, at the end of one file that grows."""
        logs = self._folder / "served" / self._slug(name) / "logs"
        with self._lock, open(self._said, "a") as file:
            file.write(f"\n=== {name}\n{errors.read_text()[-20_000:]}")
            for log in sorted(logs.glob("*.log")):
                said = log.read_text(errors="replace")[-60_000:]
                file.write(f"\n--- {log}\n{said}")


def where(device: str) -> str:
    """The machine and the vLLM, for the last column."""
    from keepmtp.validate.facts.vllm_env import find_vllm

    vllm = find_vllm()
    name = platform.machine()
    if device == "cuda":
        name = torch.cuda.get_device_properties(0).name
    return f"{name}, vLLM {vllm.version}, PyTorch {vllm.torch}"


def row(figure: Figure) -> tuple[str, ...]:
    """The cells of a figure."""
    met = ""
    if figure.expected:
        met = "yes" if figure.met else "**no**"
    cells = (figure.part, figure.what, figure.measured, figure.expected, met)
    return tuple(" ".join(cell.replace("|", "\\|").split()) for cell in cells)


def put_row(page: Path, cells: tuple[str, ...]) -> None:
    """Put a row into the table between the markers; one of the same step on the same machine is
    replaced.
    """
    before, _, rest = page.read_text().partition(BEGIN)
    table, _, after = rest.partition(END)
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    key = (*cells[:_KEY], cells[-1])
    kept = list[str]()
    is_new = True
    written = f"| {' | '.join(cells)} |"
    for old in rows:
        parts = old.removeprefix("| ").removesuffix(" |").split(" | ")
        if (*parts[:_KEY], parts[-1]) == key:
            old = written
            is_new = False
        kept.append(old)
    if is_new:
        kept.append(written)
    head = [f"| {' | '.join(HEAD)} |", f"|{'---|' * len(HEAD)}"]
    partial = page.with_suffix(".partial")
    text = "\n".join([*head, *kept])
    partial.write_text(f"{before}{BEGIN}\n{text}\n\n{END}{after}")
    partial.rename(page)


if __name__ == "__main__":
    main()
