"""A recipe's text with commits in place of branches: comments, order and spelling stay.

In: the text of a recipe or of a model file, and who knows the commits. Out: the text, edited at the
values alone.

Easy to get wrong: a model file may name a calibration block that ships with keepmtp. The name says
no commit, so the whole block replaces it.
"""

import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import cache

import yaml

from .model_file import calibrations
from .protocol import Evaluation
from .yaml_file import on_one_line

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
    for node, value in sorted(
        _edits(root, cache(commit_of)), key=lambda edit: -edit[0].start_mark.index
    ):
        text = text[: node.start_mark.index] + value + text[node.end_mark.index :]
    return text


def moves(revision: str | None) -> bool:
    """Whether a revision may mean other files tomorrow: a branch or a tag, neither a commit nor a
    folder.
    """
    return revision is not None and revision != _LOCAL and not COMMIT.fullmatch(revision)


def _edits(node: yaml.Node | None, commit_of: CommitOf) -> Iterator[tuple[yaml.Node, str]]:
    """Each value to replace, and what stands there afterwards."""
    if isinstance(node, yaml.SequenceNode):
        for each in node.value:
            yield from _edits(each, commit_of)
    if not isinstance(node, yaml.MappingNode):
        return
    values: dict[str, yaml.Node] = {key.value: value for key, value in node.value}
    said = {key: value.value for key, value in values.items() if isinstance(value, yaml.ScalarNode)}
    if "source" in said and moves(said.get("revision")):
        yield values["revision"], on_one_line(commit_of("model", said["source"], said["revision"]))
    if moves(said.get("dataset_revision")):
        # An evaluation without a dataset has its task's; a recipe that names neither has those of
        # the default task.
        dataset = (
            said.get("dataset")
            or Evaluation(**{key: said[key] for key in ("task",) if key in said}).dataset_name
        )
        yield (
            values["dataset_revision"],
            on_one_line(commit_of("dataset", dataset, said["dataset_revision"])),
        )
    for key, inner in values.items():
        if key == "calibration" and said.get(key) in calibrations():
            yield from _written_out(inner, commit_of)
        else:
            yield from _edits(inner, commit_of)


def _written_out(node: yaml.Node, commit_of: CommitOf) -> Iterator[tuple[yaml.Node, str]]:
    """A named block as a mapping on one line, with its commits; nothing where it is of a file."""
    block = deepcopy(dict(calibrations()[node.value]))
    moving = [
        texts for texts in (block, *block.get("also", ())) if moves(texts["dataset_revision"])
    ]
    for texts in moving:
        texts["dataset_revision"] = commit_of(
            "dataset", texts["dataset"], texts["dataset_revision"]
        )
    if moving:
        yield node, on_one_line(block)
