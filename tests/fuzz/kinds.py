"""The kinds of fuzz cases: which folder is damaged, how, and which command line then reads it.

In: a name in the table `kinds` of odd.yaml. Out: a strategy of `Case`s.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import corpus
import damage
from corpus import ROOT
from damage import FILES, NAMES, ODD, Other, Renamed, damaged, trees
from hypothesis import strategies as st
from test_wheels import ABOUT, GOOD, NOTED, WHEEL, zipped

KINDS = ODD["kinds"]
STEPS = 60
"""A small run is over by then."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call of the command.

    Attributes:
        base: a name of corpus.py: the folder that is copied.
        edits: what is changed in the copy.
        words: the command line; {} is the copied folder.
        name: of the copied folder.
        reads_weights: whether status 0 claims that the weights' files are good.
        writes: files in the copied folder that the verb may change.
        begun: the call of the system below OUT.partial at which a first run was killed; 0: no run.
        changes: the one at which the source's last shard is written to; 0: never.
        sealed: whether its results are sealed anew.
    """

    base: str
    edits: tuple[Any, ...]
    words: tuple[str, ...]
    name: str = "in"
    reads_weights: bool = False
    writes: tuple[str, ...] = ()
    begun: int = 0
    changes: int = 0
    sealed: bool = False


@dataclass(frozen=True)
class Zipped:
    """A wheel whose member is another."""

    file: str
    member: str
    content: bytes

    def do(self, folder: Path) -> None:
        damage.replace(folder / self.file, zipped(GOOD | {self.member: self.content}))


@st.composite
def cases(draw: st.DrawFn, kind: str) -> Case:
    told = KINDS[kind]
    base = draw(st.sampled_from(corpus.OF[told["of"]]))
    how = told.get("how", "damaged")
    more: dict[str, Any] = {
        "reads_weights": told.get("reads_weights", False),
        "writes": tuple(told.get("writes", ())),
        "sealed": how == "sealed",
    }
    if how == "planted":
        line, places = draw(st.sampled_from(sorted(ODD["planted"].items())))
        more["begun"] = draw(st.just(0) | st.integers(0, STEPS))
        place = f"../in{draw(st.sampled_from(places))}"
        edits = [Other(place, draw(st.sampled_from(ODD["stranger"])))]
    elif how == "changing":
        reads = [line for line in ODD["planted"] if "TO" in line or "/lost" in line]
        line = draw(st.sampled_from(reads))
        more |= {"changes": draw(st.integers(1, STEPS)), "writes": ("",)}
        edits = []
    else:
        line = draw(st.sampled_from(_lines(told["lines"], base)))
        edits = draw(_edits(base, told, how, line))
    if "NAME" in line:
        base = corpus.MEASURED
    elif base == corpus.MEASURED:
        line = line.replace("{}", "{}/NAME")
    if "name" in told:
        more["name"] = draw(FILES)
    if "ends" in told:
        line += " " + draw(st.sampled_from(told["ends"]))
    file = ""
    if "FILE" in line:
        file = edits[0].file
    stands = {
        "MODEL": corpus.model_of(base),
        "format=TO": f"format={corpus.DIALECTS[corpus.CURED.get(base, 'modelopt')]}",
        "OTHER": str(corpus.folder(corpus.OTHER)),
        "HELD": str(ROOT / "models" / "held_out.jsonl"),
        "TASK": file.removeprefix("rows-").partition(".")[0],
        "{}/FILE": f"{{}}/{file}",
    }
    words = [stands.get(word, word) for word in line.split()]
    if "ODD" in words:
        # No shell can type the others.
        typed = NAMES.filter(lambda name: not {"\x00", *map(chr, range(0xD800, 0xE000))} & {*name})
        words[words.index("ODD")] = draw(st.sampled_from(ODD["missing"]) | typed)
    return Case(base=base, edits=tuple(edits), words=tuple(words), **more)


def _lines(names: list[str], base: str) -> list[str]:
    """Command lines, or the names of lists of them."""
    found = [line for name in names for line in ODD.get(name, [name])]
    if "on_checkpoint" in names and corpus.model_of(base):
        found += ODD["on_model"]
        if base in corpus.REAL:
            found.append("quantize MODEL --source {} --out {}.out")
    return found


def _edits(base: str, told: dict[str, Any], how: str, line: str) -> st.SearchStrategy[list[Any]]:
    """One change of the folder, or up to three."""
    folder = corpus.folder(base)
    inner = [word.removeprefix("{}/") for word in line.split() if word.startswith("{}/")]
    where = st.sampled_from(inner)  # of cures: a folder in the base
    ends = st.sampled_from(ODD["file_ends"])
    if how == "strange":
        inside = {corpus.MEASURED: "NAME/"}.get(base, "")
        names = st.builds("{}{}{}".format, st.just(inside), FILES, ends)
        return st.lists(st.builds(Other, names, st.just("{{}}")), max_size=2)
    if how == "links":
        places = st.builds("{}/{}".format, where, st.sampled_from(ODD["links"]))
        one = st.builds(Other, places, st.sampled_from(ODD["targets"]))
    elif how == "renamed":
        added = st.builds("{}/{}{}".format, where, FILES, ends)
        new = NAMES | FILES | st.sampled_from(ODD["tensors"])
        one = st.builds(Other, added, st.just("{{}}")) | st.builds(
            Renamed, where, st.integers(0, 99), new, st.booleans()
        )
    else:
        files = {*told.get("absent", ())}
        for pattern in told.get("files", ()):
            files |= {path.relative_to(folder).as_posix() for path in folder.glob(pattern)}
        if not files:
            return st.just([])

        def change(file: str) -> st.SearchStrategy[Any]:
            if how == "sealed":
                return trees(folder, file)
            return damaged(folder, file, told.get("under", ""))

        one = st.sampled_from(sorted(files)).flatmap(change)
    if how == "zipped":
        members = st.sampled_from([ABOUT, NOTED, "vllm/__init__.py", *ODD["members"]])
        says = st.sampled_from([damage.spelled(text).encode("latin") for text in ODD["told"]])
        programs = st.sampled_from([program.encode() for program in ODD["programs"]])
        one |= st.builds(Zipped, st.just(WHEEL), members, says | programs)
    return st.lists(one, min_size=1, max_size=3)
