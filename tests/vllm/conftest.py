"""Tests against real vLLM share what takes long to start."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cache

import pytest
from checkpoint_files import Checkpoint, write
from keepmtp.recipes.family_view import language_config
from keepmtp.validate.dryload import check_on
from keepmtp.validate.dryload.loader import DryLoader, Job
from keepmtp.validate.facts.dry_load import GPU, LoadAccount
from keepmtp.validate.facts.vllm_env import VLLM, find_vllm


@pytest.fixture(scope="session")
def dry_loader() -> Iterator[Callable[[GPU], DryLoader]]:
    """vLLM's process for a pretended GPU, one for a worker: it takes 10 s to import vLLM."""
    with ExitStack() as stack:
        yield cache(lambda gpu: stack.enter_context(DryLoader(find_vllm(), gpu=gpu)))


@pytest.fixture(scope="session")
def dry_loaded(dry_loader, tmp_path_factory) -> Callable[..., dict[str, LoadAccount]]:
    """What vLLM did with checkpoints, by name."""

    def loaded(made: Mapping[str, Checkpoint], gpu: GPU = "sm100") -> dict[str, LoadAccount]:
        place = tmp_path_factory.mktemp("dry")
        jobs = []
        for number, each in enumerate(made.values()):
            method = "mtp"
            if "dspark_block_size" in language_config(each.config):
                method = "dspark"
            jobs.append(Job(folder=write(place / str(number), each), method=method))
        return dict(zip(made, dry_loader(gpu).load_all(jobs), strict=True))

    return loaded


@pytest.fixture(scope="session", autouse=True)
def one_loader(dry_loader) -> Iterator[None]:
    """`check_on` loads with that process too."""
    with pytest.MonkeyPatch.context() as patched:

        def loader(vllm: VLLM, *, gpu: GPU) -> AbstractContextManager[DryLoader]:
            if vllm.site:
                return DryLoader(vllm, gpu=gpu)
            return nullcontext(dry_loader(gpu))

        patched.setattr(check_on, "DryLoader", loader)
        yield


@pytest.fixture
def one_thread(monkeypatch) -> None:
    """Of each server."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
