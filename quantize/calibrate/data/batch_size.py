"""How many sequences a batch has where the recipe says `batch_size: auto`.

In: a plan, the folder of its pass, and the ranks. Out: the plan with a number: as many sequences as
the memory holds that is free on the device with the least of it.

Easy to get wrong: a run that goes on with another number has other last bits under GPTQ and AWQ,
which add up batch by batch. So the first choice is kept in the folder, and every rank takes the
same.
"""

from dataclasses import replace
from pathlib import Path

import torch

from ....checkpoints.files import write_whole
from ....recipes.schema import AUTO
from ...needs.free_memory import free_host_bytes
from ...needs.memory import MAX_TOKENS, largest_batch_size
from ...plan.plan import Plan
from ...run.ranks import Ranks

_FILE = "batch_size"
_SHARE = 0.9  # of what is free on a GPU: other processes may take some later
_SHARE_OF_HOST = 0.25  # states and the next layer are there too
# More tokens at a time only leave its caches.
_MAX_TOKENS_ON_CPU = 8_192


def with_batch_size(plan: Plan, folder: Path, ranks: Ranks) -> Plan:
    """The plan with a number of sequences in a batch, the recipe's or one that is chosen now or was
    chosen before.

    Args:
        plan: over a local source, with a calibration block.
        folder: of the pass; every rank sees it.
        ranks: each calls this.
    """
    calibration = plan.calibration
    if calibration.batch_size != AUTO:
        return plan
    path, is_on_cpu = folder / _FILE, ranks.device.type == "cpu"
    if path.is_file():
        size = int(path.read_text())
    else:
        if is_on_cpu:
            tokens, free = _MAX_TOKENS_ON_CPU, free_host_bytes() * _SHARE_OF_HOST
            free /= ranks.local_size
        else:
            tokens, free = MAX_TOKENS, torch.cuda.mem_get_info(ranks.device)[0] * _SHARE
        share = -(-calibration.samples // ranks.size)
        rows = min(share, max(1, tokens // calibration.sequence_length))
        # Where not even one should fit, one is tried: the count is careful.
        size = max(1, largest_batch_size(plan, int(free), at_most=rows))
    size = ranks.least(size)
    if ranks.is_first and not path.is_file():
        write_whole(path, str(size))
    settled = calibration.model_copy(update={"batch_size": size})
    return replace(plan, recipe=plan.recipe.model_copy(update={"calibration": settled}))
