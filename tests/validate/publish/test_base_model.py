"""A card names as base model what was read from the Hub, or says that its author states it."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import cards
import pytest
import reports
from keepmtp.checkpoints.record import RECORD, Record, read_record
from keepmtp.checkpoints.source import open_source
from keepmtp.recipes.errors import CheckpointError, RecipeError
from keepmtp.validate.report import card
from keepmtp.validate.report.base_model import base_model_of, refuse_no_id, refuse_unknown

KEEPMTP = str(Path(sys.executable).with_name("keepmtp"))
RELEASE = "org/Release"


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A checkpoint of a fine-tune in a local folder, by the recipe of a release."""
    return cards.checkpoint(tmp_path_factory.mktemp("made") / "tiny")


def changed(
    record: Record, *, name: str = "my-finetune", revision: str = "local", recipe: str = RELEASE
) -> Record:
    source = record.source.model_copy(update={"name": name, "revision": revision})
    by = record.recipe.model_copy(update={"source": recipe, "revision": "main"})
    return record.model_copy(update={"source": source, "recipe": by})


def test_what_was_read_from_the_hub_is_the_base_model(made):
    record = changed(read_record(made / RECORD), name="a/B", revision="f" * 40)
    found = base_model_of(record, None)
    assert (
        found
        and (found.name, found.is_proven) == ("a/B", True)
        and f"commit `{'f' * 40}`" in found.says
    )
    other = base_model_of(record, "c/D")
    assert other and not other.is_proven and "What was read is the repository `a/B`" in other.says


def test_the_recipes_source_is_never_taken_for_a_folder(made):
    record = changed(read_record(made / RECORD))
    assert base_model_of(record, None) is None
    stated = base_model_of(record, "me/Base")
    assert stated and (stated.name, stated.is_proven) == ("me/Base", False)
    assert stated.says.startswith(
        "Stated by the author. What was read is the local folder `my-finetune`"
    )
    none = base_model_of(record, "none")
    assert none and none.name == "" and "names no base model" in none.says


def test_a_shipped_model_has_none(made):
    record = read_record(made / RECORD)
    for named in (None, "none"):
        found = base_model_of(record, named)
        assert found and found.name == "" and "comes with keepmtp" in found.says
    files = {name: size + 1 for name, size in record.source.files.items()}
    another = record.model_copy(
        update={"source": record.source.model_copy(update={"files": files})}
    )
    assert base_model_of(another, None) is None, "another model of that name"


@pytest.mark.parametrize("name", ["GLM-4.7", "../x", "a/b/c", "a b/c"])
def test_what_is_no_id_is_refused(name):
    with pytest.raises(
        RecipeError,
        match=r"--base-model: must have the Hub's form; got .* Choose with --base-model ORG/NAME",
    ):
        refuse_no_id(name)


def finetune(folder: Path) -> Path:
    """A copy of a shipped model under another name."""
    return shutil.copytree(reports.MODEL, folder / "my-finetune")


def quantized(folder: Path, source: Path) -> Path:
    """A checkpoint made of a local folder by a recipe whose own source is the release."""
    out = cards.checkpoint(folder / "out")
    told = json.loads((out / RECORD).read_text())
    told["source"]["name"] = source.name
    told["recipe"] |= {"source": RELEASE, "revision": "main"}
    (out / RECORD).write_text(json.dumps(told))
    cards.evidence(out)
    return out


def test_of_a_local_folder_the_author_is_asked(tmp_path):
    out = quantized(tmp_path, source := finetune(tmp_path))
    words = [KEEPMTP, "card", out, "--source", source]
    done = subprocess.run(words, capture_output=True, text=True)
    said = " ".join(done.stderr.split())
    assert (
        done.returncode == 2
        and "a card names a base model that was read or is stated; got the local folder" in said
    )
    assert "Name it with --base-model ORG/NAME, or say --base-model none." in said
    assert not card.card_folder(out).exists()
    subprocess.run([*words, "--base-model", "me/Base"], check=True)
    text = (card.card_folder(out) / "README.md").read_text()
    assert "base_model: me/Base" in text and "Stated by the author" in text
    assert card.verified_files(out)
    assert RELEASE not in text.partition("<details><summary>recipe.yaml")[0], (
        "the recipe's own source is no claim"
    )


@pytest.mark.full
def test_all_asks_before_the_work(tmp_path):
    """Hours before the card."""
    source = open_source(finetune(tmp_path))
    with pytest.raises(
        CheckpointError, match=r"got the local folder .*my-finetune\. Name it with --base-model"
    ):
        refuse_unknown(source)
    refuse_unknown(open_source(reports.MODEL))
    words = ["all", "tiny-glm4-moe", "--source", str(source.where), "--out", str(tmp_path / "out")]
    done = subprocess.run([KEEPMTP, *words], capture_output=True, text=True)
    assert (
        done.returncode == 2 and "--base-model" in done.stderr and not (tmp_path / "out").exists()
    )
    dry = subprocess.run(
        [KEEPMTP, *words, "--base-model", "me/Base", "--dry-run"], capture_output=True, text=True
    )
    assert dry.stdout.splitlines()[-1].endswith("--base-model me/Base"), dry.stderr
