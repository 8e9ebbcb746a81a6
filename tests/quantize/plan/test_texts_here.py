"""The plan judges the text that it names: its files and columns, without torch."""

import json

import pytest
from data_files import table
from keepmtp.checkpoints.source import open_source
from keepmtp.pipeline import plan_before_measuring
from keepmtp.quantize.write.refusals import refusals
from keepmtp.recipes.find import find_recipe
from keepmtp.recipes.model_file import shipped_path
from keepmtp.recipes.schema import Calibration

WRONG = table("quantize/plan/test_texts_here")["WRONG"]
ROWS = [{"text": "four", "answer": "five"}] * 40


@pytest.fixture
def said(tmp_path, monkeypatch):
    """Called with changes of a calibration block: what would stop its plan."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    (tmp_path / "rows.csv").write_text("text")
    recipe, _ = find_recipe("tiny-glm4-moe.nvfp4")
    source = open_source(shipped_path("tiny-glm4-moe"))

    def refused(**changed) -> list[str]:
        block = {"dataset": "rows.jsonl", "column": "text", "prompt_column": None} | changed
        block = Calibration.model_validate(recipe.calibration.model_dump() | block)
        made = recipe.model_copy(update={"calibration": block})
        return refusals(plan_before_measuring(made, source))

    return refused


@pytest.mark.parametrize("says", WRONG)
def test_text_that_a_run_could_not_use(says, said):
    (sentence,) = said(**WRONG[says])
    assert says in sentence


def test_text_that_it_could(said):
    assert said() == said(prompt_column="answer", chat=True) == []
