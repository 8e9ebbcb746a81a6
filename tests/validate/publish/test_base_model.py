"""A card names as base model what was read, or what is equal byte for byte, or says that its author states it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import cards
import pytest
import reports
from hub import serving
from keepmtp.checkpoints.record import RECORD, Record, read_record
from keepmtp.checkpoints.source import open_source
from keepmtp.recipes.errors import CheckpointError, RecipeError
from keepmtp.validate.facts.results import report_folder
from keepmtp.validate.report import card
from keepmtp.validate.report.base_model import FILE, base_model_of, refuse_no_id, refuse_unknown

KEEPMTP = str(Path(sys.executable).with_name("keepmtp"))
RELEASE = "org/Release"


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A checkpoint of a fine-tune in a local folder, by the recipe of a release."""
    return cards.checkpoint(tmp_path_factory.mktemp("made") / "tiny")


def changed(record: Record, *, name: str = "my-finetune", revision: str = "local", recipe: str = RELEASE) -> Record:
    source = record.source.model_copy(update={"name": name, "revision": revision})
    by = record.recipe.model_copy(update={"source": recipe, "revision": "main"})
    return record.model_copy(update={"source": source, "recipe": by})


def test_what_was_read_from_the_hub_is_the_base_model(made, tmp_path):
    record = changed(read_record(made / RECORD), name="a/B", revision="f" * 40)
    found = base_model_of(record, tmp_path, None)
    assert found and (found.name, found.is_proven) == ("a/B", True) and f"commit `{'f' * 40}`" in found.says
    other = base_model_of(record, tmp_path, "c/D")
    assert other and not other.is_proven and "What was read is the repository `a/B`" in other.says


def test_the_recipes_source_is_never_taken_for_a_folder(made, tmp_path):
    record = changed(read_record(made / RECORD))
    assert base_model_of(record, tmp_path, None) is None
    stated = base_model_of(record, tmp_path, "me/Base")
    assert stated and (stated.name, stated.is_proven) == ("me/Base", False)
    assert stated.says.startswith("Stated by the author. What was read is the local folder `my-finetune`")
    none = base_model_of(record, tmp_path, "none")
    assert none and none.name == "" and "names no base model" in none.says


def test_a_shipped_model_has_none(made, tmp_path):
    record = read_record(made / RECORD)
    for named in (None, "none"):
        found = base_model_of(record, tmp_path, named)
        assert found and found.name == "" and "comes with keepmtp" in found.says
    files = {name: size + 1 for name, size in record.source.files.items()}
    another = record.model_copy(update={"source": record.source.model_copy(update={"files": files})})
    assert base_model_of(another, tmp_path, None) is None, "another model of that name"


@pytest.mark.parametrize("name", ["GLM-4.7", "../x", "a/b/c", "a b/c"])
def test_what_is_no_id_is_refused(name):
    with pytest.raises(
        RecipeError, match=r"--base-model: must have the Hub's form; got .* Choose with --base-model ORG/NAME"
    ):
        refuse_no_id(name)


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("hub")) as running:
        running.mirror(RELEASE, reports.MODEL)
        yield running


def keepmtp(hub, folder: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    home = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(folder / "hf"), "HF_HUB_DISABLE_XET": "1"}
    command = [KEEPMTP, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | home, cwd=folder)


def finetune(folder: Path, *, spoil: bool) -> Path:
    """A copy of the release under another name; spoilt, it has one other byte of a weight and the same headers."""
    source = folder / "my-finetune"
    source.mkdir(parents=True)
    for path in reports.MODEL.iterdir():
        if path.is_file():
            (source / path.name).write_bytes(path.read_bytes())
    if spoil:
        shard = min(source.glob("*.safetensors"))
        shard.write_bytes(shard.read_bytes()[:-1] + b"\x7f")
    return source


def quantized(folder: Path, source: Path) -> Path:
    """A checkpoint made of a local folder by a recipe whose own source is the release."""
    out = cards.checkpoint(folder / "out")
    told = json.loads((out / RECORD).read_text())
    told["source"]["name"] = source.name
    told["recipe"] |= {"source": RELEASE, "revision": "main"}
    (out / RECORD).write_text(json.dumps(told))
    cards.evidence(out)
    return out


@pytest.mark.few(1)
@pytest.mark.parametrize("is_large", [False, True])
def test_a_folder_with_the_bytes_of_the_release_is_that_release(is_large, hub, tmp_path):
    """Compared once; the card is verified without the Hub afterwards."""
    for path in reports.MODEL.glob("*.safetensors"):
        hub.repos[RELEASE].commits[-1][path.name] = hub.store(path.read_bytes(), large=is_large)
    source = finetune(tmp_path, spoil=False)
    out = quantized(tmp_path, source)
    done = keepmtp(hub, tmp_path, "card", out, "--source", source)
    assert done.returncode == 0, done.stderr
    text = (card.card_folder(out) / "README.md").read_text()
    assert f"base_model: {RELEASE}" in text and f"[{RELEASE}](https://huggingface.co/{RELEASE}) quantized to" in text
    assert "same bytes of all 2 safetensors files as commit" in text and (report_folder(out) / FILE).is_file()
    assert card.verify(out) == card.card_folder(out)
    (report_folder(out) / FILE).write_text("{}")
    with pytest.raises(CheckpointError, match=r"base_model\.json: must be a comparison"):
        card.verify(out)


@pytest.mark.full
def test_a_finetune_with_the_headers_of_the_release_is_asked_for(hub, tmp_path):
    source = finetune(tmp_path, spoil=True)
    out = quantized(tmp_path, source)
    done = keepmtp(hub, tmp_path, "card", out, "--source", source)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    words = " ".join(done.stderr.split())
    assert f"my-finetune, which is not {RELEASE}: model-00001-of-00002.safetensors has other bytes" in words
    assert "Name it with --base-model ORG/NAME, or say --base-model none." in words
    assert not card.card_folder(out).exists()
    stated = keepmtp(hub, tmp_path, "card", out, "--source", source, "--base-model", "me/Base")
    text = (card.card_folder(out) / "README.md").read_text()
    assert stated.returncode == 0 and "base_model: me/Base" in text and "Stated by the author" in text
    assert RELEASE not in text.partition("<details><summary>recipe.yaml")[0], "the recipe's own source is no claim"


def test_without_the_source_or_the_hub_it_is_asked_for(made, tmp_path):
    out = quantized(tmp_path, Path("my-finetune"))
    done = subprocess.run([KEEPMTP, "card", str(out)], capture_output=True, text=True)
    assert done.returncode == 2 and "a card names a base model that was read or is stated" in done.stderr


@pytest.mark.full
def test_all_asks_before_the_work(tmp_path):
    """Hours before the card: a local folder by a recipe whose release cannot be compared, or is none."""
    source = open_source(finetune(tmp_path, spoil=False))
    with pytest.raises(CheckpointError, match=r"got the local folder .*my-finetune\. Name it with --base-model"):
        refuse_unknown(source, "models/x", "local")
    refuse_unknown(open_source(reports.MODEL), RELEASE, "main")
    words = ["all", "tiny-glm4-moe", "--source", str(source.where), "--out", str(tmp_path / "out")]
    done = subprocess.run([KEEPMTP, *words], capture_output=True, text=True)
    assert done.returncode == 2 and "--base-model" in done.stderr and not (tmp_path / "out").exists()
    dry = subprocess.run([KEEPMTP, *words, "--base-model", "me/Base", "--dry-run"], capture_output=True, text=True)
    assert dry.stdout.splitlines()[-1].endswith("--base-model me/Base"), dry.stderr
