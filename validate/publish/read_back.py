"""Checks a repository where it is: the static check, and vLLM's own loaders, by range requests.

In: a repository at one commit, and the parcel that was sent. Out: what the check found there.

Easy to get wrong: a cut on the way says nothing about the checkpoint. Only a repository that was read has findings.
"""

import time
from collections.abc import Callable

from ...checkpoints.hub_client import HubError
from ...recipes.errors import VLLMError
from ..check.check import Checked, examine
from ..dryload.check_on import check_on
from ..facts.dry_load import GPU, GPUS
from ..facts.vllm_env import VLLM, find_vllm
from .hub import AGAIN, WAITS_SECONDS, Remote
from .upload_set import Parcel

_GPU: GPU = "sm100"


def load_remote(
    remote: Remote,
    parcel: Parcel,
    *,
    gpu: GPU | None = None,
    watch: Callable[[str], None] = lambda doing: None,
) -> tuple[Checked, str]:
    """Check a repository by range requests, with vLLM's own loaders if there is a vLLM here.

    Args:
        remote: the commit that must be the repository's newest.
        parcel: what is there; its first dry load is repeated unless `gpu` is given.
        gpu: the GPU to pretend.
        watch: called with words about what is being done.

    Returns: what was found, and in words what was tried.

    Raises:
        HubError: it cannot be read now, or somebody else wrote to it in the meantime.
    """
    first = next(iter(parcel.report.dry), None)
    tp, k = (first.tp, first.k) if first and gpu is None else (1, 1)
    wanted = gpu or (first.gpu if first else _GPU)
    chosen: GPU = next(known for known in GPUS if known == wanted)
    vllm = _vllm()

    def load() -> Checked:
        if vllm is None:
            return examine(remote.repo)
        (checked,) = check_on([remote.repo], vllm=vllm, gpus=[chosen], tps=[tp], num_drafts=k, progress=watch)
        return checked

    checked = load()
    if checked.refusal is not None:  # a cut, or a Hub that is busy: both pass
        time.sleep(WAITS_SECONDS[0])
        checked = load()
    if checked.refusal is not None:
        raise HubError(remote.repo, "must be readable there", got=str(checked.refusal).rstrip("."), cure=AGAIN)
    if checked.source is not None and checked.source.revision != remote.commit:
        got = f"commit {checked.source.revision}"
        raise HubError(remote.repo, "nobody else may write to it meanwhile", got=got, cure=AGAIN)
    if vllm is None:
        return checked, "static check, no dry load: no vLLM here (see `keepmtp doctor`)"
    return checked, f"dry load on {chosen} at TP {tp} with vLLM {vllm.version}"


def _vllm() -> VLLM | None:
    try:
        return find_vllm()
    except VLLMError:
        return None
