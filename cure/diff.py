"""What a proposal changes, as a diff that people read.

In: a `Proposal`. Out: lines, each hunk with its reasons.

Easy to get wrong: a list with one more item has one changed line, not two.
"""

import json
from collections import defaultdict
from collections.abc import Iterable
from difflib import unified_diff
from itertools import groupby
from operator import itemgetter

from ..checkpoints.proposal import Proposal
from ..checkpoints.source import small_bytes
from ..recipes.errors import printable

_MOST_LINES = 14  # of one run that only adds or only removes
_MOST_COMPARED = 20_000  # lines: difflib takes minutes where thousands of them change


def diffs(proposal: Proposal) -> list[str]:
    """The lines of a diff of every small file that changes, and a line for each kind of change
    of a tensor.
    """
    lines = []
    for name, data in sorted(proposal.files().items()):
        reasons = [edit.why for edit in proposal.edits if edit.file == name]
        lines += json_diff(name, small_bytes(proposal.source, name), data, reasons)
    groups: dict[str, list[str]] = defaultdict(list)
    for edit in proposal.edits:
        if edit.says:
            groups[edit.why].append(f"~ {edit.says}")
    for why, changes in groups.items():
        lines += ["--- tensors", f"# {why}", *changes[:4]]
        if len(changes) > 4:
            lines.append(f"~  ... {len(changes) - 4:,} more ...")
    return lines


def json_diff(
    name: str, before: bytes | None, after: bytes | None, reasons: Iterable[str] = ()
) -> list[str]:
    """The lines of a unified diff; [] if the values are the same. A comma after an item is no part
    of it: a list with one more item has one changed line, not two.

    Args:
        name: the file's name.
        before, after: its bytes; None where there is no such file.
        reasons: why it changes.
    """
    old = _lines(before)
    new = _lines(after)
    if old == new:
        return []
    lines = [f"--- a/{name}", f"+++ b/{name}"]
    for reason in dict.fromkeys(reasons):
        lines.append(f"# {reason}")
    if len(old) + len(new) > _MOST_COMPARED:
        lines.append(f"@@ -{len(old)} +{len(new)} @@")
        return lines
    _, _, *body = unified_diff(old, new, n=2, lineterm="")
    for sign, group in groupby(body, key=itemgetter(0)):
        run = [printable(line) for line in group]
        more = len(run) - _MOST_LINES
        if sign in "+-" and more > 0:
            run[_MOST_LINES // 2 : -_MOST_LINES // 2] = [f"{sign}  ... {more:,} more lines ..."]
        lines += run
    return lines


def _lines(data: bytes | None) -> list[str]:
    if data is None:
        return []
    text = json.dumps(json.loads(data), indent=2, ensure_ascii=False)
    return text.replace(",\n", "\n").split("\n")
