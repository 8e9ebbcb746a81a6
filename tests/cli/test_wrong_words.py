"""What somebody types wrong in a first hour: one sentence each, with the cure that is right. In one
process: no server.

The list was made by trying every verb with a wrong name, a wrong place and a wrong number.
"""

import shlex
import shutil
import socket
import sys
from pathlib import Path

import pytest
from commands import ROOT
from keepmtp.cli import main
from keepmtp.recipes import find
from keepmtp.recipes.errors import KeepMTPError

TINY = ROOT / "models" / "tiny-glm4-moe"

WRONG = [
    # places without a checkpoint, under each verb that takes one
    ("check gguf", "got model-Q4_K_M.gguf. Name that of a whole model"),
    ("explain adapter", "an adapter is merged into its base model first."),
    ("serve adapter --dry-run", "an adapter is merged into its base model first."),
    ("check empty", "got an empty folder. Name that of a whole model"),
    ("check parent", "got tiny. Name that of a whole model"),
    ("check tiny/config.json", "Name the folder of a checkpoint in safetensors files."),
    ("serve glm-4.7 --dry-run", "got no such folder. Check its name."),
    ("check nothere", "got no such folder. Check its name."),
    ("check https://example.com/org/name", "got no such folder. Check its name."),
    ("graft tiny --from nothere --out new", "got no such folder. Check its name."),
    ("bench gguf", "Name that of a whole model"),
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
    ("plan tiny-glm4-moe --gpu-memory plenty", "must be a number of GiB, or one of A100"),
    ("plan tiny-glm4-moe --gpu-memory -3", "must be a number of GiB"),
    ("plan tiny-glm4-moe --calibration ultrachat", "Did you mean ultrachat-256x2048?"),
    ("eval tiny --task gsm8", "Did you mean gsm8k?"),
    ("eval tiny --task gsm8k,mmlu_pro", "--task: must be one of gsm8k, "),
    ("ls scheme", "Did you mean schemes?"),
    ("ls colours", "or a model's name; got 'colours'. Run `keepmtp ls`"),
    ("ls glm4.7", "Did you mean glm-4.7?"),
    ("ls glm-4.7 glm-5", "got glm-4.7 glm-5. Run it for each."),
    ("check org/name --record", "--record: keeps the check of one folder"),
    ("check tiny qwen --record", "--record: keeps the check of one folder"),
    ("check tiny --record --gpu sm70", "--gpu: must be one of"),
    # outputs
    ("quantize ./tiny", "These fit: nvfp4a16-fp8, "),
    ("quantize ./tiny --scheme w4a16-fp8 --out tiny", "Choose another OUT."),
    ("quantize tiny-glm4-moe --out tiny/config.json", "Choose another OUT."),
    ("init ./tiny --out tiny/config.json", "Choose another --out."),
    ("quantize nothere.yaml", "See `keepmtp ls models`."),
    ("graft tiny --from tiny", "Add --out NEW, or --dry-run."),
    ("convert tiny --to modelopt --out new", "Quantize the original release"),
    # numbers and files
    ("serve tiny -k 99 --dry-run", "Use -k 4 or less; `keepmtp bench` finds the best."),
    ("serve tiny tiny", "Run it for each."),
    ("bench tiny -k 0-4", "Write --k 1,8,32 or --k 0..4."),
    ("bench tiny --concurrency 0", "Write --concurrency 1,8,32 or --concurrency 1..4."),
    ("bench tiny --prompts nothere.jsonl", "got No such file or directory. Give "),
    ("publish tiny --repo name", "Name it as on the Hub."),
    ("card empty", "Name that folder."),
    # words that typer reads: verbs, options, arguments
    (
        "quantise tiny-glm4-moe",
        "keepmtp: has no such command; got quantise. Did you mean quantize?",
    ),
    ("chek tiny", "Did you mean check?"),
    ("--vers", "Did you mean --version?"),
    ("plan", "keepmtp plan: needs model; got none. See `keepmtp plan --help`."),
    ("check", "keepmtp check: needs paths; got none."),
    ("convert tiny", "keepmtp convert: needs --to; got none."),
    ("graft tiny", "keepmtp graft: needs --from; got none."),
    ("publish tiny", "keepmtp publish: needs --repo; got none."),
    ("plan tiny-glm4-moe extra", "takes no more words; got plan tiny-glm4-moe extra."),
    ("check tiny --gpus sm90", "Did you mean --gpu?"),
    ("quantize tiny-glm4-moe --output x", "Did you mean --out?"),
    ("quantize tiny-glm4-moe --dry", "Did you mean --dry-run?"),
    ("quantize tiny-glm4-moe --model x", "See `keepmtp quantize --help`."),
    ("doctor --gpu", "See `keepmtp doctor --help`."),
    ("check tiny --tp 0", "--tp: must be greater than or equal to 1; got 0."),
    ("check tiny --tp two", "--tp: must be a valid integer; got two."),
    ("check tiny --tp", "--tp: needs a value; got check tiny --tp."),
    ("check tiny --json=yes", "--json: takes no value; got check tiny --json=yes."),
    (
        "serve tiny -k -1",
        "-k/--num-speculative-tokens: must be greater than or equal to 0; got -1.",
    ),
    ("serve tiny --port 99999", "--port: must be less than or equal to 65535; got 99999."),
    ("serve tiny --prot 8001", "Did you mean --port?"),
    (
        "convert tiny --to gguf",
        "--to: must be one of compressed-tensors, modelopt; got gguf. Name one.",
    ),
    ("convert tiny --to model-opt", "Did you mean modelopt?"),
    # words for `vllm serve`
    ("serve tiny --tensor-parallel-size 2", "Words for `vllm serve` stand last, after `--`."),
    ("serve tiny -- --port 8001", "got --port. Name it before `--`."),
    ("serve tiny -- -tp 2 --dry-run", "got --dry-run. Name it before `--`."),
    ("serve tiny -- --speculative-config {}", "-k 0 serves without drafting."),
    ("serve tiny -- --speculative_config={}", "-k 0 serves without drafting."),
    ("serve tiny -- -x --disable-log-stats", "acceptance is read from these figures"),
    ("bench tiny -- --port 1", "keepmtp alone talks to its servers"),
    # recipes
    (
        "plan seed.yaml",
        "seed is not a key of a model file; got 1. The keys are model, family, source,",
    ),
    ("plan modle.yaml", "Did you mean model?"),
    ("plan colour.yaml", "The keys are model, family, source,"),
    ("plan nogroups.yaml", "groups must be given; got nothing. Add it"),
    ("plan default.yaml", "Did you mean w4a16-fp8?"),
    ("plan tab.yaml", "Indent with spaces, not with tabs."),
    ("plan list.yaml", "got list. `keepmtp init MODEL --out NEW.yaml` writes one to edit."),
    ("plan none.yaml", "got nothing. `keepmtp init MODEL --out NEW.yaml` writes one to edit."),
    ("init tiny-glm4-moe --out nodir/x.yaml", "Make it, or choose another."),
    ("eval tiny --source none --recipe glm4.7", "Did you mean glm-4.7?"),
    ("eval tiny --source none --api chats", "Did you mean chat?"),
    ("quantize tiny-glm4-moe --mtp int4", "See `keepmtp ls schemes`."),
    ("quantize tiny --source tiny --scheme w4a16-fp8", "Remove it, or name a recipe as MODEL."),
    ("quantize tiny-glm4-moe --source qwen", "Choose another MODEL"),
    ("plan tiny-glm4-moe --calibration mix-512x2048", "Remove it."),
    # paths
    ("plan notes.txt", "Name the folder of a checkpoint in safetensors files."),
    ("plan https://huggingface.co/zai-org", "Name the address of a repository's page."),
    ("plan glm-4.7 --source nothere", "Check its name."),
    ("plan tiny-glm4-moe --mtp-source nothere", "Check its name."),
    (
        "quantize ./alone --scheme w4a16-fp8",
        "Download all of its files; weights in .bin or GGUF files are not read.",
    ),
    ("gate 'my model'", "Run `keepmtp check '"),
    ("publish empty --repo a/b", "got no config.json. Name its folder."),
    ("publish tiny --repo a/b", "let `keepmtp check ORG/NAME` judge it there."),
    ("publish tiny --repo https://huggingface.co/a/b", "Name it as on the Hub."),
    ("explain tiny --log tiny", "or pipe it"),
    ("explain", "Name a folder, or --log."),
    ("graft tiny --from qwen --out new", "Name the release that it was made from."),
    ("graft tiny --from tiny --out new", "say --replace"),
    ("closeness tiny --source tiny", "Give a .txt file"),
    ("serve-check tiny --source qwen", "Name the release that it was made from."),
    ("check tiny --draft nothere --gpu sm90", "--draft: nothere: a checkpoint is a folder"),
    ("check tiny --gpu sm90,sm100", "Repeat it: --gpu sm90 --gpu sm100."),
    ("bench tiny -k 9..1", "a range that goes up, by 64 at most; got 9..1."),
    ("all tiny", "These fit: nvfp4a16-fp8, "),
    ("all tiny-glm4-moe --out tiny --dry-run", "Choose another --out."),
]
MODEL_FILE = find.named_file("tiny-glm4-moe")[0].path.read_text()
MISTAKES = {
    "seed": MODEL_FILE + "seed: 1\n",
    "modle": MODEL_FILE.replace("model:", "modle:", 1),
    "colour": MODEL_FILE + "colour: red\n",
    "nogroups": MODEL_FILE.replace("groups:", "keep:", 1),
    "default": MODEL_FILE.replace("default: ", "default: x", 1),
    "tab": MODEL_FILE.replace("variants:", "\tvariants:", 1),
    "list": "- a\n- b\n",
    "none": "",
}


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("places")
    shutil.copytree(TINY, folder / "tiny")
    shutil.copytree(TINY, folder / "parent" / "tiny")
    shutil.copytree(TINY, folder / "my model")
    shutil.copytree(TINY.with_name("tiny-qwen3_5"), folder / "qwen")
    (folder / "alone").mkdir()
    shutil.copy(TINY / "config.json", folder / "alone")
    (folder / "notes.txt").write_text("hello\n")
    for name, text in MISTAKES.items():
        (folder / f"{name}.yaml").write_text(text)
    files = {
        "gguf": "model-Q4_K_M.gguf",
        "adapter": "adapter_config.json",
        "empty": "",
    }
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
def test_a_wrong_word_has_one_right_sentence(words, cure, refusal, places):
    message = refusal(words)
    assert cure in message and "; got " in message and "\n" not in message
    assert "remove" not in message, "nothing that is not ours"
    assert not [*places.glob("*.report")]


def test_a_busy_port_is_told_before_anything_is_read(refusal):
    with socket.create_server(("127.0.0.1", 0)) as busy:
        assert "Choose another --port" in refusal(f"serve gguf --port {busy.getsockname()[1]}")


def test_a_wrong_task_is_told_before_lm_eval_is_imported(refusal, monkeypatch):
    monkeypatch.setitem(sys.modules, "keepmtp.validate.measure.lm_eval_task", None)
    assert "Did you mean gsm8k?" in refusal("eval tiny --task gsm8")
