"""Tests against real vLLM share what takes long to start."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cache
from pathlib import Path

import matrix
import pytest
from checkpoint_files import Checkpoint, write
from keepmtp.recipes.family_view import language_config
from keepmtp.validate.dryload import check_on
from keepmtp.validate.dryload.loader import DryLoader, Job
from keepmtp.validate.dryload.versions import cache_folder, had_vllms
from keepmtp.validate.facts.dry_load import GPU, LoadAccount
from keepmtp.validate.facts.vllm_env import VLLM, find_vllm

# For these GPUs a process stays; the others are asked once, and memory is short.
ASKED_OFTEN = ("sm90", "sm100")


@pytest.fixture(scope="session")
def dry_loader() -> Iterator[Callable[..., DryLoader]]:
    """vLLM's process for a pretended GPU and a version, one for a worker: it takes 10 s to import
    vLLM.
    """
    with ExitStack() as stack:

        @cache
        def started(gpu: GPU, site: Path | None = None) -> DryLoader:
            vllm = find_vllm()
            if site:
                ((vllm, *_), _) = had_vllms([str(site)], vllm)
            return stack.enter_context(DryLoader(vllm, gpu=gpu))

        yield started


@pytest.fixture(scope="session")
def dry_loaded(one_loader, tmp_path_factory) -> Callable[..., dict[str, LoadAccount]]:
    """What vLLM did with checkpoints, by name."""

    def loaded(made: Mapping[str, Checkpoint], gpu: GPU = "sm100") -> dict[str, LoadAccount]:
        place = tmp_path_factory.mktemp("dry")
        jobs = []
        for number, each in enumerate(made.values()):
            method = "mtp"
            if "dspark_block_size" in language_config(each.config):
                method = "dspark"
            jobs.append(Job(folder=write(place / str(number), each), method=method))
        with check_on.DryLoader(find_vllm(), gpu=gpu) as loader:
            return dict(zip(made, loader.load_all(jobs), strict=True))

    return loaded


@pytest.fixture(scope="session", autouse=True)
def one_loader(dry_loader) -> Iterator[None]:
    """`check_on` and the pages load with these processes too."""
    with pytest.MonkeyPatch.context() as patched:

        def loader(vllm: VLLM, *, gpu: GPU) -> AbstractContextManager[DryLoader]:
            is_ours = vllm.site is None or vllm.site.parent == cache_folder()
            if gpu not in ASKED_OFTEN or not is_ours:
                return DryLoader(vllm, gpu=gpu)
            return nullcontext(dry_loader(gpu, vllm.site))

        for module in (check_on, matrix):
            patched.setattr(module, "DryLoader", loader)
        yield


@pytest.fixture
def one_thread(monkeypatch) -> None:
    """Of each server."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
