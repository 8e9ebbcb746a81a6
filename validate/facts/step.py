"""How far a long measurement with servers is; `cli/progress.py` shows it.

In: what a station has asked so far. Out: a `Step` for whoever watches.

Easy to get wrong: the rate is of this sitting. What an earlier run left on the disk counts as done,
and not as fast.
"""

from ...recipes.frozen import frozen


@frozen
class Step:
    """How far one checkpoint is.

    Attributes:
        role: which one, as its station names it.
        doing: what else than asking is going on; "" while it is asked.
        done, total: in `unit`.
        tokens_per_second: of this sitting: generated, or read as a prompt.
        eta_seconds: at this sitting's rate; None where there is none yet.
        unit: what is asked one at a time.
        task: that is asked; "" where a station has but one.
    """

    role: str
    doing: str
    done: int
    total: int
    tokens_per_second: float = 0.0
    eta_seconds: float | None = None
    unit: str = "question"
    task: str = ""
