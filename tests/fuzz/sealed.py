"""The kind of fuzz cases whose evidence was sealed anew: a seal has no key, so anybody can.

In: a random generator. Out: a `Case`, as in kinds.py, which lists it, and its further fault: a good
end though the checkpoint's own headers fail, or a card with a tag that is none.
"""

import json
import re
from pathlib import Path
from random import Random

import corpus
import edits
from case import Case, some
from data_files import json_of
from edits import Edit
from keepmtp.checkpoints.identity import identify
from keepmtp.validate.check.check import check
from keepmtp.validate.facts.results import seal_of
from keepmtp.validate.report.card_metadata import read_front_matter
from keepmtp.validate.report.report import from_results, text_of

WORDS = ("gate {}/NAME", "gate {}/NAME.report --json", "publish {}/NAME --repo org/name --dry-run")
WORDS += ("card {}/NAME --base-model none --out {}.card",)


def seal(folder: Path) -> None:
    """Each result is of the bytes that are there now, and says so; report.json follows."""
    evidence = folder / "NAME.report"
    identity = identify(folder / "NAME")
    for path in evidence.glob("*.json"):
        result = json_of(path)
        if "seal" in result:
            text = path.read_text().replace(result["checkpoint"]["sha256"], identity.sha256)
            result = json.loads(text) | {"checkpoint": identity.model_dump(mode="json")}
            edits.replace(path, json.dumps(result | {"seal": seal_of(result)}).encode())
    edits.replace(evidence / "report.json", text_of(from_results(evidence)).encode())


SEAL = Edit("its results are sealed anew", seal)


def _edit(rng: Random, folder: Path) -> Edit:
    """One value of a header, of config.json or of a result is another."""
    way = rng.random()
    if way < 0.3:
        shard = min(folder.glob("NAME/*.safetensors"))
        file = shard.relative_to(folder).as_posix()
        return edits.grafted(rng, file, edits.read_header(shard)[0], header=True)
    file = "NAME/config.json"
    if way > 0.6:
        file = f"NAME.report/{rng.choice(('check', 'check', 'serve', 'eval', 'bench'))}.json"
    return edits.grafted(rng, file, json_of(folder / file))


def sealed(rng: Random) -> Case:
    """A measured checkpoint or its results are others, and the seals fit."""
    folder = corpus.folder(corpus.MEASURED)
    made = (*some(rng, lambda: _edit(rng, folder)), SEAL)
    words = tuple(rng.choice(WORDS).split())
    return Case(base=corpus.MEASURED, edits=made, words=words, reads_weights=False, also=green)


def green(case: Case, folder: Path, status: int) -> list[str]:
    """What a good end may not have."""
    faults = []
    if not status and not check(folder / "NAME").ok:
        faults.append("green though its headers fail")
    card = Path(f"{folder}.card")
    if card.is_dir():
        tags = read_front_matter(card)["tags"]
        faults += [f"a tag {tag!a}" for tag in tags if not re.fullmatch(r"[\w.+-]{1,64}", str(tag))]
    return faults
