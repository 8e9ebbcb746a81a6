"""The static check of a checkpoint, as the rules' tests ask it: facts and findings alone."""

from typing import Any

from keepmtp.validate.check.check import examine
from keepmtp.validate.facts.results import CheckData


def check(checkpoint: Any, **how: Any) -> CheckData:
    """Of a folder, a Hub id or headers; `how` as in `examine`."""
    return examine(checkpoint, **how).data
