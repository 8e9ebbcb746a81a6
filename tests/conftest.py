"""How the suite is shared among worker processes; and a Hub on loopback (hub.py) for tests that
read a repository.

A file stays on one worker, since its fixtures are what takes long, and so do all files that use
vLLM's dry loaders: `make test` says --dist loadfile.
"""

import gc
import os
import signal
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import wheel
from filelock import FileLock
from hub import serving
from pairwise import pairwise
from xdist.scheduler import LoadFileScheduling

TESTS = Path(__file__).parent
# Of a worker and what it starts: llm-compressor and two models in one, two vLLM servers of 1.5 GiB
# in another.
WORKER_GIB = 5
# What takes half a minute and more, longest first; the rest follows in order.
LONG = (
    "vllm/test_gsm8k.py",
    "vllm/test_dry_corpus.py",
    "vllm/test_bench.py",
    "vllm/test_serve.py",
    "vllm/test_closeness.py",
    "vllm/test_acceptance_without_server.py",
    "vllm/test_tiny_models.py",
    "vllm/test_draft_logits.py",
    "vllm/test_serve_verb.py",
    "vllm/test_older_gpus.py",
    "test_wheel.py",
    "test_dist.py",
    "quantize/calibrate/test_mtp_pass.py",
    "quantize/calibrate/test_ranks.py",
    "quantize/calibrate/test_pretended_gpu.py",
    "quantize/calibrate/test_backbone.py",
    "quantize/calibrate/test_tuning.py",
    "quantize/calibrate/test_calibrated_output.py",
    "quantize/calibrate/test_search_pass.py",
    "quantize/test_output.py",
    "quantize/test_kills.py",
    "validate/publish/test_faults.py",
    "validate/publish/test_upload.py",
    "validate/publish/test_card.py",
    "cli/test_survivors.py",
    "cli/test_end_to_end.py",
    "cli/test_init.py",
    "cli/test_main.py",
    "cli/test_serve.py",
    "cure/test_cured_failures.py",
    "fuzz/test_fuzz.py",
)

# They share vLLM's dry loaders (vllm/conftest.py), a process for each GPU.
DRY = (
    "check_on",
    "dry_corpus",
    "dry_names",
    "kv_cache",
    "matrix",
    "real_releases",
)

gc.disable()  # until all tests are known

# What tests start keeps its bytecode, as on people's machines: a new environment would compile
# PyTorch once more in each process.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A shell ignores them in what it starts in the background, and what tests start would inherit that.
for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)

if "PYTEST_XDIST_WORKER" in os.environ:
    # Before anything imports torch. Workers fill the cores by themselves, and what they start
    # inherits this.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_xdist_auto_num_workers() -> int:
    """For `-n auto`: one a core that this process may use and one more, since a test that starts
    or stops something waits; as many as memory holds.
    """
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return max(1, min(len(os.sched_getaffinity(0)) + 1, int(gib / WORKER_GIB)))


class Files(LoadFileScheduling):
    """A whole file to a worker; the files of dry loads to one, and those of the wheel to one."""

    def _split_scope(self, nodeid: str) -> str:
        file = Path(super()._split_scope(nodeid))
        if "vllm" in file.parts and file.stem.removeprefix("test_") in DRY:
            return "dry loads"
        return "wheel" if file.stem in ("test_wheel", "test_dist") else str(file)


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> Files | None:
    return Files(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.hookimpl(tryfirst=True)  # before -m is looked at
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first where workers share the suite; and of a large product, what `make test`
    leaves out is marked.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:
        places = {TESTS / name: place for place, name in enumerate(LONG)}
        items.sort(key=lambda item: places.get(item.path, len(places)))
    products: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("few"):
            products[item.nodeid.partition("[")[0]].append(item)
    for cases in products.values():
        (number,) = cases[0].get_closest_marker("few").args
        kept = pairwise([case.callspec.params for case in cases], number)
        for place, case in enumerate(cases):
            if place not in kept:
                case.add_marker(pytest.mark.full)


def pytest_collection_finish() -> None:
    """Modules and items live to the end: no collection of garbage has to walk them."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module")
def in_f32() -> Iterator[None]:
    """For a file whose time is BF16 products, and whose peers are no other program's bits."""
    from f32_products import multiply_in_f32

    with pytest.MonkeyPatch.context() as patched:
        multiply_in_f32(patched.setattr)
        yield


@pytest.fixture(scope="session")
def made_once(tmp_path_factory) -> Callable[[str, Callable[[Path], Path]], Path]:
    """What a folder holds that one worker makes for all of them, by its name."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def once(name: str, make: Callable[[Path], Path]) -> Path:
        folder, says = shared / name, shared / f"{name}.made"
        with FileLock(shared / f"{name}.lock"):
            if not says.exists():
                folder.mkdir()
                says.write_text(str(make(folder)))
        return Path(says.read_text())

    return once


@pytest.fixture(scope="session")
def built(made_once) -> Path:
    """keepmtp's wheel."""
    return made_once("wheel", wheel.build)


@pytest.fixture(scope="session")
def installed(built, made_once) -> Callable[[str], Path]:
    """The bin folder of an environment that has one extra of the wheel and nothing else; made once
    for each.
    """

    def install(extra: str) -> Path:
        return made_once(f"env-{extra}", lambda folder: wheel.install(built, extra, folder / "env"))

    return install


@pytest.fixture
def hub_at(monkeypatch, tmp_path):
    """Points huggingface_hub at an endpoint; its constants were read from the environment when it
    was imported.
    """
    from huggingface_hub import constants, hf_api

    def point(endpoint: str) -> None:
        for holder in (constants, hf_api):
            monkeypatch.setattr(holder, "ENDPOINT", endpoint, raising=False)
        template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)

    return point


@pytest.fixture
def serve_hub(hub_at, tmp_path_factory) -> Iterator[Callable[[Path], list[str]]]:
    """Serves a folder as the repository org/model; returns the list that the requests are noted
    in.
    """
    with ExitStack() as servers:

        def serve(folder: Path) -> list[str]:
            hub = servers.enter_context(serving(tmp_path_factory.mktemp("hub")))
            hub.mirror("org/model", folder)
            hub_at(hub.endpoint)
            return hub.requests

        yield serve


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Threads cost more than they bring at these sizes: minutes, on a machine that is busy."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
