"""A recipe's text with commits in place of branches: comments, order and spelling stay.

In: the text of a recipe or of a model file, and who knows the commits. Out: the text, edited at the values alone.

Easy to get wrong: a model file may name a calibration block that ships with keepmtp. The name says no commit, so the
whole block replaces it.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache

import yaml

from .model_file import calibrations
from .protocol import Evaluation

CommitOf = Callable[[str, str, str], str]
"""From "model" or "dataset", a Hub id and a revision to the commit."""
COMMIT = re.compile(r"[0-9a-f]{40}")
_LOCAL = "local"


def pinned_text(text: str, commit_of: CommitOf) -> str:
    """The text with every `revision` and `dataset_revision` as a commit.

    Args:
        text: of a file that `find.read_file` reads.
        commit_of: is asked once for each revision that is neither a commit nor "local".
    """
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    assert isinstance(root, yaml.MappingNode)
    edits = {node.start_mark.index: (node.end_mark.index, value) for node, value in _edits(root, cache(commit_of))}
    for start in sorted(edits, reverse=True):
        end, value = edits[start]
        text = text[:start] + value + text[end:]
    return text


def moves(revision: str | None) -> bool:
    """Whether a revision may mean other files tomorrow: a branch or a tag, neither a commit nor a folder."""
    return revision is not None and revision != _LOCAL and not COMMIT.fullmatch(revision)


def _edits(root: yaml.MappingNode, commit_of: CommitOf) -> Iterator[tuple[yaml.Node, str]]:
    """Each value to replace, and what stands there afterwards."""
    top = _values(root)
    yield from _edit(top, "model", "source", "revision", commit_of)
    variants = top.get("variants")
    holders = [_values(node) for node in _values(variants).values()] if variants is not None else []
    for holder in (top, *holders):
        block = holder.get("calibration")
        if isinstance(block, yaml.MappingNode):
            also = _values(block).get("also")
            for texts in (block, *(also.value if isinstance(also, yaml.SequenceNode) else ())):
                yield from _edit(_values(texts), "dataset", "dataset", "dataset_revision", commit_of)
        elif isinstance(block, yaml.ScalarNode) and block.value in calibrations():
            yield from _written_out(block, commit_of)
        yield from _edit(_values(holder.get("mtp_source")), "model", "source", "revision", commit_of)
        block = holder.get("evaluation")
        for one in block.value if isinstance(block, yaml.SequenceNode) else (block,):
            yield from _evaluation(_values(one), commit_of)


def _evaluation(values: Mapping[str, yaml.Node], commit_of: CommitOf) -> Iterator[tuple[yaml.Node, str]]:
    """The revision of the task's own dataset; a file has none."""
    task, at = values.get("task"), values.get("dataset_revision")
    if isinstance(at, yaml.ScalarNode) and moves(at.value):
        raw = {"task": task.value} if isinstance(task, yaml.ScalarNode) else {}
        yield at, _flow(commit_of("dataset", Evaluation.model_validate(raw).dataset_name, at.value))


def _edit(
    values: Mapping[str, yaml.Node], kind: str, name: str, revision: str, commit_of: CommitOf
) -> Iterator[tuple[yaml.Node, str]]:
    named, at = values.get(name), values.get(revision)
    if isinstance(named, yaml.ScalarNode) and isinstance(at, yaml.ScalarNode) and moves(at.value):
        yield at, _flow(commit_of(kind, named.value, at.value))


def _written_out(node: yaml.ScalarNode, commit_of: CommitOf) -> Iterator[tuple[yaml.Node, str]]:
    """A named block as a mapping on one line, with its commit; nothing where it is of a file."""
    block = dict(calibrations()[node.value])
    mix = [block, *(dict(texts) for texts in block.get("also", ()))]
    moving = [texts for texts in mix if moves(texts["dataset_revision"])]
    for texts in moving:
        texts["dataset_revision"] = commit_of("dataset", texts["dataset"], texts["dataset_revision"])
    if mix[1:]:
        block["also"] = mix[1:]
    if moving:
        yield node, _flow(block)


def _flow(value: object) -> str:
    """A value on one line. A commit of digits alone gets quotes: it is no number."""
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000)
    return text.removesuffix("...\n").strip()


def _values(node: yaml.Node | None) -> dict[str, yaml.Node]:
    pairs = node.value if isinstance(node, yaml.MappingNode) else []
    return {key.value: value for key, value in pairs}
