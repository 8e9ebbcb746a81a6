"""A recipe of a stranger: data of a few plain types, or one sentence that says on which line."""

import os
import tracemalloc
from pathlib import Path

import pytest
from data_files import cases, put_json, spelled, table
from keepmtp.recipes.errors import RecipeError
from keepmtp.recipes.find import find_recipe, read_file
from keepmtp.recipes.model_file import model_files
from keepmtp.recipes.yaml_file import load_shipped, read_yaml

REFUSED = table("recipes/test_yaml_file")["REFUSED"]


@pytest.mark.parametrize("text, said", REFUSED.values(), ids=REFUSED)
def test_what_no_recipe_has(text, said, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(spelled(text))
    tracemalloc.start()
    with pytest.raises(RecipeError) as caught:
        read_file(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    message = str(caught.value)
    assert message.startswith(f"{path}: {said}") and len(message) < 1000 and message.isprintable()
    assert peak < 30e6


@pytest.mark.parametrize("raw", [b"model: \xff", "model: x".encode("utf-16"), b"\xed\xa0\x80: 1"])
def test_a_recipe_that_is_not_in_utf_8(raw, tmp_path):
    (tmp_path / "mine.yaml").write_bytes(raw)
    with pytest.raises(
        RecipeError, match=r"a recipe must be text in UTF-8; got .* at byte \d\. Save it as UTF-8\."
    ):
        read_file(tmp_path / "mine.yaml")


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to(path)])
def test_what_is_no_file_is_not_opened(make, tmp_path):
    make(tmp_path / "mine.yaml")
    for read in (read_file, lambda path: find_recipe(str(path))):
        with pytest.raises(RecipeError, match=r"a recipe( file)? must "):
            read(tmp_path / "mine.yaml")


def test_a_shipped_file_is_the_same_for_both_readers():
    for path in model_files():
        assert read_yaml(path) == (load_shipped(path), path.read_text())


@pytest.mark.parametrize("key", ["model", "variant", "family"])
@cases
def test_a_name_that_would_lead_to_another_folder(key, name, tmp_path):
    path = flat(tmp_path, key, name)
    with pytest.raises(
        RecipeError, match=f"mine.yaml: {key}: must be a plain name of letters, digits,"
    ):
        find_recipe(path)


def flat(folder: Path, key: str, value: object) -> str:
    """A good recipe with another value of one key, in a file."""
    raw = find_recipe("glm-4.7.nvfp4-fp8")[0].model_dump(mode="json")
    *outer, last = key.split(".")
    holder = raw
    for part in outer:
        holder = holder[part]
    holder[last] = value
    path = folder / "mine.yaml"
    put_json(path, raw)
    return str(path)


@pytest.mark.parametrize("pattern", ["re:(", "re:[z-a]", "re:*", "re:(?P<a>x)(?P<a>y)"])
def test_a_regex_that_is_none(pattern, tmp_path):
    with pytest.raises(
        RecipeError, match=r"mine.yaml: keep\.0: must be a name, or re: and a regex; got "
    ):
        find_recipe(flat(tmp_path, "keep", [pattern]))
    with pytest.raises(
        RecipeError,
        match=r"mine.yaml: overrides\.0\.modules: must be a name, or re: and a regex; got ",
    ):
        find_recipe(flat(tmp_path, "overrides", [{"modules": pattern, "scheme": "bf16"}]))


@pytest.mark.parametrize("value", [True, "3", 1.5, 2**31])
@pytest.mark.parametrize("key", ["samples", "held_out", "sequence_length", "batch_size", "seed"])
def test_a_count_that_is_none(key, value, tmp_path):
    if key == "seed" and value == 2**31:
        value = 2**64
    with pytest.raises(RecipeError, match=rf"mine.yaml: calibration\.{key}"):
        find_recipe(flat(tmp_path, f"calibration.{key}", value))
