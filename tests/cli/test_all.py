"""`keepmtp all`: what it would run, and what it refuses before it runs anything. Real:
tests/vllm/test_gsm8k.py.
"""

import json
import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from commands import make, ran, refused
from keepmtp.cli.main import app
from keepmtp.recipes.find import find_recipe
from printed import printed
from shipped import made_of
from tables import cases
from typer.testing import CliRunner
from vllms import CPU

TINY = find_recipe("tiny-glm4-moe.w4a16-fp8")[1]
COMMANDS = """tiny-glm4-moe --mtp bf16 --gpu sm90 --tp 2 -k 3
fast.yaml -k 3 -- --max-model-len 512
close.yaml
tiny-glm4-moe --text held_out.txt --no-serve-check
minimax-m3 --mtp-source org/block
tiny-glm4-moe -- --tensor-parallel-size 8
tiny-glm4-moe --scheme W8A16 --out made --no-serve-check
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with recipes, and one checkpoint that is finished."""
    folder = tmp_path_factory.mktemp("place")
    made_of("tiny-glm4-moe", folder / "made", scheme="W8A16")
    (folder / "held_out.txt").write_text("Some text.")
    (folder / "fast.yaml").write_text(f"{TINY}gates: {{min_speedup: 1.2}}\n")
    limited = yaml.safe_load(TINY) | {"gates": {"max_flips": 0.1}}
    for name, model in (("close", "tiny-glm4-moe"), ("unknown", "mine")):
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(limited | {"model": model}))
    return folder


def test_the_commands_in_their_order(place):
    """With the words that each takes; what a recipe limits is measured, and what is finished is not
    made again.
    """
    said = ""
    for words in COMMANDS.splitlines():
        ours, _, for_vllm = words.partition(" -- ")
        line = f"all {ours} --dry-run" + f" -- {for_vllm}" * bool(for_vllm)
        said += f"$ keepmtp {line}\n{ran(line, cwd=place)}\n"
    printed("all_dry_run.txt", said)
    assert not (place / "out").exists()


def test_what_is_refused_before_anything_runs(place):
    says = "--text: names the held-out text to compare on; got none"
    refused("all unknown.yaml", says=says, cwd=place)
    assert not (place / "out").exists()


@pytest.mark.parametrize("target", ["all", "validate", "validate EVAL=gsm8k"])
def test_words_for_vllm_reach_it_through_make(target):
    words = f"--no-print-directory -n {target} OUT=x K=3".split()
    done = make(*words, "VLLM_ARGS=--tensor-parallel-size 8")
    line = " ".join(done.stdout.replace("\\\n", " ").splitlines()[-1].split())
    assert re.search(r"keepmtp .*-k 3 -- --tensor-parallel-size 8$", line), done.stdout


@cases
def test_it_ends_with_the_status_of_the_first_red_gate(
    station, status, ended, last, place, monkeypatch
):
    """Only serve-check may find too little: eval asks more."""
    begun = []

    def child(command, **_):
        begun.append(command[3])
        process = SimpleNamespace(wait=lambda: status if begun[-1] == station else 0)
        return nullcontext(SimpleNamespace(process=process))

    monkeypatch.setattr("keepmtp.cli.all.Child", child)
    monkeypatch.setattr("keepmtp.cli.all.chosen_vllm", lambda: CPU)
    words = ["all", "tiny-glm4-moe", "--scheme", "W8A16", "--out", str(place / "made")]
    assert CliRunner().invoke(app, words).exit_code == ended
    assert begun[-1] == last


@pytest.mark.full
def test_what_evaluates_is_asked_before_anything_is_quantized(tmp_path):
    """Neither a missing vLLM nor a dataset without answers is found out after hours."""
    refused("all tiny-glm4-moe", says="none", cwd=tmp_path, VLLM_PYTHON=str(tmp_path / "none"))
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"question": "1 + 1?", "reply": "#### 2"}) + "\n")
    (tmp_path / "recipe.yaml").write_text(TINY.replace("models/held_out.jsonl", str(rows)))
    says = "rows.jsonl:1: must have the field answer"
    refused("all recipe.yaml", says=says, cwd=tmp_path)
    assert not (tmp_path / "out").exists()
