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
from data_files import table
from filelock import FileLock
from hub import serving
from xdist.scheduler import LoadFileScheduling

TESTS = Path(__file__).parent
# Of a worker and what it starts: llm-compressor and two models in one, two vLLM servers of 1.5 GiB
# in another.
WORKER_GIB = 5

TABLE = table("conftest")

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
        if "vllm" in file.parts and file.stem.removeprefix("test_") in TABLE["DRY"]:
            return "dry loads"
        if file.stem in ("test_wheel", "test_dist"):
            return "wheel"
        return str(file)


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> Files | None:
    if config.getvalue("dist") == "loadfile":
        return Files(config, log)
    return None


@pytest.hookimpl(tryfirst=True)  # before -m is looked at
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first where workers share the suite; and of a large product, all but `few` cases
    at even distances, the first among them, are `full`, and all but a second number are `spare`.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:
        places = {TESTS / name: place for place, name in enumerate(TABLE["LONG"])}
        items.sort(key=lambda item: places.get(item.path, len(places)))
    products: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("few"):
            products[item.nodeid.partition("[")[0]].append(item)
    for cases in products.values():
        number, *more = cases[0].get_closest_marker("few").args
        quick = _spread(number, len(cases))
        asked = quick.union(*(_spread(each, len(cases)) for each in more))
        for place, case in enumerate(cases):
            if place not in quick:
                case.add_marker(pytest.mark.full)
            if more and place not in asked:
                case.add_marker(pytest.mark.spare)


def _spread(number: int, length: int) -> set[int]:
    return {place * length // number for place in range(number)}


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
def for_all(tmp_path_factory) -> Path:
    """A folder in which the first worker that asks makes something for all."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@pytest.fixture(scope="session")
def built(for_all) -> Path:
    """keepmtp's wheel."""
    folder = for_all / "wheel"
    with FileLock(f"{folder}.lock"):
        for path in folder.glob("*.whl"):
            return path
        return wheel.build(folder)


@pytest.fixture(scope="session")
def installed(built, for_all) -> Callable[[str], Path]:
    """The bin folder of an environment that has one extra of the wheel and nothing else."""

    def install(extra: str) -> Path:
        folder = for_all / f"env-{extra}"
        with FileLock(f"{folder}.lock"):
            if not (folder / "bin" / "keepmtp").exists():
                wheel.install(built, extra, folder)
        return folder / "bin"

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
        monkeypatch.setattr(
            constants,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            endpoint + "/{repo_id}/resolve/{revision}/{filename}",
        )
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
