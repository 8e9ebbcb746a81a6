"""How far the weights of a checkpoint are from its release's, group by group, by those that
`keepmtp check --values` samples: of the MTP block, and of the first, middle and last layer.

In: the `RuntimeView`s of both. Out: a `WeightError` a group. Of a repository the bytes of these
weights are fetched, and no others.

Easy to get wrong: another shape is another weight, and has no error.
"""

from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from torch import Tensor

from ...checkpoints.dequantize import dequantize
from ...checkpoints.dialects.runtime_view import RuntimeView
from ...checkpoints.source import Source
from ...checkpoints.stored import StoredWeight
from ...checkpoints.values import read_parts
from ...recipes.frozen import Say, silent
from ..check.against import Pair, pairs, relative_error
from ..facts.comparison import WeightError, group_of

_AT_A_TIME = 2  # pairs of whole matrices that are in memory


def weight_errors(
    runtime: RuntimeView, release: RuntimeView, progress: Say = silent
) -> tuple[dict[str, WeightError], dict[str, str]]:
    """The errors by group; and of groups that have none for it, whose values are infinite or NaN.

    Raises:
        CheckpointError: a file ends early, the Hub does not send it.
    """
    found = []
    for pair in pairs(runtime, release, whole=False).found:
        if pair.weight.shape == pair.theirs.shape:
            found.append(pair)
    progress(f"{runtime.source.where}: comparing {len(found):,} weights with the release's")
    off = defaultdict[str, float](float)
    size = defaultdict[str, float](float)
    num_read = Counter[str]()
    worst = dict[str, tuple[float, str]]()
    not_finite = dict[str, str]()
    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        errors = pool.map(partial(_error, runtime.source, release.source), found)
        for pair, (error, norm) in zip(found, errors, strict=True):
            group = group_of(pair.place)
            module = pair.weight.module
            if not error < float("inf"):
                not_finite.setdefault(group, f"infinity or NaN in {module}")
            off[group] += error**2 * norm
            size[group] += norm
            num_read[group] += pair.num_bytes
            worst[group] = max(worst.get(group, (0.0, module)), (error, module))
    measured = {}
    for group, (far, module) in worst.items():
        if group in not_finite:
            continue
        value = 0.0
        if size[group]:
            value = (off[group] / size[group]) ** 0.5
        measured[group] = WeightError(
            value=value, worst=module, worst_value=far, num_read=num_read[group]
        )
    return measured, not_finite


def _error(ours: Source, theirs: Source, pair: Pair) -> tuple[float, float]:
    """The relative error of one weight, and the squared norm of the release's."""
    original = _values(theirs, pair.theirs)
    norm = original.float().square().sum().item()
    return relative_error(_values(ours, pair.weight), original), norm


def _values(source: Source, weight: StoredWeight) -> Tensor:
    """A whole weight [N, K]."""
    parts = read_parts(source, weight.parts)
    parts.pop("weight_shape", None)  # which is that of the release
    where = f"{source.where}: {weight.module}"
    return dequantize(weight.form, parts, shape=weight.shape, block=weight.block, where=where)
