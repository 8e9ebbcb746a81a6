"""One rank of a tensor-parallel world whose other ranks do not exist.

In: vLLM's config, a TP size and a rank. Out: vLLM's process groups with torch's fake backend, which
answers for the other ranks.
"""

import functools
from typing import Any

import torch


def init(config: Any, *, tp: int, rank: int) -> None:
    """Become rank `rank` of `tp`. Call it once in a process."""
    import vllm.distributed.parallel_state as state
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from vllm.config import set_current_vllm_config
    from vllm.v1.worker.workspace import init_workspace_manager

    torch.distributed.init_process_group(
        backend="fake", store=FakeStore(), rank=rank, world_size=tp
    )
    new_group = torch.distributed.new_group
    torch.distributed.new_group = lambda ranks=None, *args, **kwargs: new_group(
        ranks, backend="fake"
    )
    coordinate = state.GroupCoordinator.__init__

    @functools.wraps(coordinate)
    def without_message_queue(self: Any, *args: Any, **kwargs: Any) -> None:
        coordinate(self, *args, **{**kwargs, "use_message_queue_broadcaster": False})

    state.GroupCoordinator.__init__ = without_message_queue  # type: ignore[method-assign]
    state._node_count = lambda group: 1
    with set_current_vllm_config(config):
        state.init_distributed_environment(tp, rank, "env://", rank, "fake")
        state.initialize_model_parallel(tp, 1)
    init_workspace_manager(torch.device("cuda"))
