"""What somebody types wrong in a first hour: one sentence each, with the cure that is right. In one process: no server.

The list was made by trying every verb with a wrong name, a wrong place and a wrong number.
"""

import shlex
import shutil
import socket
import sys
from pathlib import Path

import pytest
from keepmtp.cli import main
from keepmtp.recipes.errors import KeepMTPError

ROOT = Path(__file__).parent.parent.parent
TINY = ROOT / "models" / "tiny-glm4-moe"

WRONG = [
    # places without a checkpoint, under each verb that takes one
    *((f"{verb} gguf", "Name the safetensors release that the GGUF file was made of.") for verb in ("check", "fix")),
    ("explain adapter", "Merge it into its base model"),
    ("plan ./adapter", "Merge it into its base model"),
    ("serve adapter --dry-run", "Merge it into its base model"),
    ("check empty", "got an empty folder. Download the checkpoint into it, or name its Hub id."),
    ("check tok", "got a tokenizer alone. Save the model into this folder too"),
    ("check parent", "Name parent/tiny."),
    ("check tiny/config.json", "Name its folder, tiny."),
    ("check tiny-glm4-moe", "run `keepmtp quantize tiny-glm4-moe`, and name the folder that it writes."),
    ("serve glm-4.7 --dry-run", "run `keepmtp quantize glm-4.7`"),
    ("check nothere", "got no such folder. Check its name."),
    ("check https://example.com/org/name", "Name a folder, ORG/NAME or the address of its page."),
    ("graft tiny --from nothere --out new", "got no such folder. Check its name."),
    ("bench gguf", "Name the safetensors release"),
    ("eval gguf", "Name the safetensors release"),
    ("gate gguf", "Name that folder."),
    # names
    ("check tiny --gpu h10", "Did you mean h100?"),
    ("check tiny --gpu 5091", "Did you mean 5090?"),
    ("check tiny --gpu A100", "A100 is sm80, which is not judged: leave --gpu out."),
    ("check tiny --gpu MI300", "Name the card, such as H100, or one of these."),
    ("check tiny --runtime vlm", "Did you mean vllm?"),
    ("check tiny --tp 4", "Add --gpu sm100."),
    ("check tiny --source tiny", "Add --values."),
    ("check tiny --values scale", "Did you mean scales?"),
    ("plan glm4.7", "Did you mean glm-4.7?"),
    ("plan glm-4.7-nvfp4", "Did you mean glm-4.7?"),
    ("plan nothere", "See `keepmtp ls`."),
    ("plan ./tiny --scheme nvpf4", "Did you mean NVFP4?"),
    ("plan ./tiny --scheme Q4_K_M", "See `keepmtp ls schemes`."),
    ("plan tiny-glm4-moe --gpu-memory H10", "Did you mean H100?"),
    ("plan tiny-glm4-moe --calibration ultrachat", "Did you mean ultrachat-256x2048?"),
    ("eval tiny --task gsm8", "Did you mean gsm8k?"),
    ("eval tiny --task gsm8k,mmlu_pro", "Name one; a recipe may list several."),
    ("ls scheme", "Did you mean schemes?"),
    # outputs
    ("quantize ./tiny", "These fit: nvfp4a16-fp8, "),
    ("quantize ./tiny --scheme w4a16-fp8 --out tiny", "Choose another OUT."),
    ("quantize tiny-glm4-moe --out tiny/config.json", "Choose another OUT."),
    ("init ./tiny --out tiny/config.json", "Choose another --out."),
    ("pin tiny-glm4-moe", "Give --out tiny-glm4-moe.yaml."),
    ("quantize nothere.yaml", "See `keepmtp ls models`."),
    ("graft tiny --from tiny", "Add --out NEW, or --dry-run."),
    ("convert tiny --to modelopt --out new", "Quantize it first."),
    # numbers and files
    ("serve tiny -k 99 --dry-run", "Use -k 4 or less; `keepmtp bench` finds the best."),
    ("serve tiny tiny", "Run it for each."),
    ("bench tiny -k 0-4", "Write --k 1,8,32 or --k 0..4."),
    ("bench tiny --concurrency 0", "Write --concurrency 1,8,32 or --concurrency 1..4."),
    ("bench tiny --prompts nothere.jsonl", "got No such file or directory. Give a .jsonl file"),
    ("publish tiny --repo name", "Name it as on the Hub."),
    ("card empty", "Name that folder."),
]


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("places")
    shutil.copytree(TINY, folder / "tiny")
    shutil.copytree(TINY, folder / "parent" / "tiny")
    files = {"gguf": "model-Q4_K_M.gguf", "adapter": "adapter_config.json", "tok": "tokenizer.json", "empty": ""}
    for name, file in files.items():
        (folder / name).mkdir()
        if file:
            (folder / name / file).write_text("{}")
    return folder


@pytest.fixture
def refusal(places, monkeypatch, capsys):
    """Called with words: the sentence of the refusal, which check prints itself and goes on."""
    monkeypatch.chdir(places)

    def run(words: str) -> str:
        try:
            ended = main._command()(shlex.split(words), prog_name="keepmtp", standalone_mode=False)
        except KeepMTPError as error:
            return str(error)
        assert ended == 2
        return capsys.readouterr().err.strip()

    return run


@pytest.mark.parametrize(("words", "cure"), WRONG, ids=[words for words, _ in WRONG])
def test_a_wrong_word_has_one_right_sentence(words, cure, refusal):
    message = refusal(words)
    assert cure in message and "; got " in message and "\n" not in message
    assert "remove" not in message, "nothing that is not ours"


def test_a_busy_port_is_told_before_anything_is_read(refusal):
    with socket.create_server(("127.0.0.1", 0)) as busy:
        assert "Choose another --port" in refusal(f"serve gguf --port {busy.getsockname()[1]}")


def test_a_wrong_task_is_told_before_lm_eval_is_imported(refusal, monkeypatch):
    monkeypatch.setitem(sys.modules, "keepmtp.validate.measure.lm_eval_task", None)
    assert "Did you mean gsm8k?" in refusal("eval tiny --task gsm8")
