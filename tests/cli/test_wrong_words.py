"""What somebody types wrong in a first hour (wrong_words.yaml): one sentence each, with the cure
that is right. In one process: no server.

The list was made by trying every verb with a wrong name, a wrong place and a wrong number.
"""

import json
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from commands import GLM
from data_files import table
from keepmtp.cli import main
from keepmtp.recipes import find
from keepmtp.recipes.errors import KeepMTPError
from releases import source_layout, write_checkpoint

WRONG = yaml.safe_load(Path(__file__).with_name("wrong_words.yaml").read_text())
MODEL_FILE = find.named_file("tiny-glm4-moe")[0].path.read_text()
FILES = table("cli/test_wrong_words")["FILES"] | {
    "alone/config.json": (GLM / "config.json").read_text(),
    "seed.yaml": MODEL_FILE + "seed: 1\n",
    "backbone.yaml": MODEL_FILE + "backbone: auto\n",
    "modle.yaml": MODEL_FILE.replace("model:", "modle:", 1),
    "colour.yaml": MODEL_FILE + "colour: red\n",
    "nogroups.yaml": MODEL_FILE.replace("groups:", "keep:", 1),
    "default.yaml": MODEL_FILE.replace("default: ", "default: x", 1),
    "tab.yaml": MODEL_FILE.replace("variants:", "\tvariants:", 1),
    "override.yaml": find.find_recipe("tiny-glm4-moe.w4a16-fp8")[1]
    + "overrides:\n  - {modules: model.layers.99.mlp.gate_proj, scheme: bf16}\n",
}
CONFIGS = table("cli/test_wrong_words")["CONFIGS"]


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("places")
    for name in ("tiny", "parent/tiny", "my model", "chat", *CONFIGS):
        shutil.copytree(GLM, folder / name)
    shutil.copytree(GLM.with_name("tiny-qwen3_5"), folder / "qwen")
    config = json.loads(FILES["alone/config.json"])
    changed = {f"{name}/config.json": json.dumps(config | CONFIGS[name]) for name in CONFIGS}
    for name, text in (FILES | changed | {"chat/chat_template.jinja": "{{ messages }}"}).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    for name in ("empty", "bare.report"):
        (folder / name).mkdir()
    config, tensors = source_layout("glm-4.7", size="tiny")
    write_checkpoint(folder / "new", config | {"model_type": "glm5_moe"}, tensors)
    plain = {key: value for key, value in config.items() if key != "num_nextn_predict_layers"}
    write_checkpoint(folder / "llama", plain | {"model_type": "llama"}, tensors)
    changes = {"moe_intermediate_size": 72}  # no multiple of 16
    odd = source_layout("glm-4.7", size="tiny", changes=changes)
    write_checkpoint(folder / "narrow", *odd)
    return folder


@pytest.fixture
def refusal(places, monkeypatch, capsys):
    """Called with words: the sentence of the refusal, which check prints itself and goes on."""
    monkeypatch.chdir(places)

    def run(words: str) -> str:
        monkeypatch.setattr("sys.argv", ["keepmtp", *shlex.split(words)])
        with pytest.raises((KeepMTPError, SystemExit)) as ended:
            main.command()
        if isinstance(ended.value, KeepMTPError):
            return str(ended.value)
        assert ended.value.code == 2
        return capsys.readouterr().err.strip()

    return run


def written(folder: Path) -> dict[Path, int]:
    """Every file but remembered hashes, and when it was written."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".hashes.json")
    return {path: path.stat().st_mtime_ns for path in files}


@pytest.mark.parametrize("words", WRONG)
def test_a_wrong_word_has_one_right_sentence(words, refusal, places):
    before = written(places)
    message = refusal(words)
    assert WRONG[words] in message and "; got " in message and "\n" not in message
    assert message.endswith((".", "?")) and "remove" not in message, "nothing that is not ours"
    assert before == written(places)


def test_a_wrong_task_is_told_before_lm_eval_is_imported(refusal, monkeypatch):
    monkeypatch.setitem(sys.modules, "keepmtp.validate.measure.lm_eval_task", None)
    assert "Did you mean gsm8k?" in refusal("eval tiny --task gsm8")
