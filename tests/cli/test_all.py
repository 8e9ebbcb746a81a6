"""`keepmtp all`: what it would run, and what it refuses before it runs anything. Real:
tests/vllm/test_gsm8k.py.
"""

import json
import re
import subprocess
from pathlib import Path

import pytest
from commands import ROOT, keepmtp, make
from keepmtp.pipeline import plan_for, quantize
from keepmtp.recipes.find import find_recipe

GLM = ROOT / "models" / "tiny-glm4-moe"


def run_all(command: str, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return keepmtp(f"all {command}", *words, cwd=ROOT, **environment)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    plan, text = plan_for("tiny-glm4-moe", source=str(GLM), scheme="W8A16")
    return quantize(plan, text, out=tmp_path_factory.mktemp("made") / "glm").out


def test_the_commands_in_their_order(tmp_path):
    out = tmp_path / "out"
    done = run_all(
        f"tiny-glm4-moe --mtp bf16 --out {out} --gpu sm90 --tp 2 -k 3 --dry-run",
    )
    assert done.returncode == 0 and done.stdout.splitlines() == [
        f"keepmtp quantize tiny-glm4-moe --mtp bf16 --out {out}",
        f"keepmtp check {out} --record --gpu sm90 --tp 2 -k 3",
        f"keepmtp serve-check {out} -k 3",
        f"keepmtp eval {out} -k 3",
        f"keepmtp card {out}",
    ]
    assert not out.exists()


def test_a_recipe_with_a_limit_on_speed_is_timed_and_judged(tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(find_recipe("tiny-glm4-moe.w4a16-fp8")[1] + "gates: {min_speedup: 1.2}\n")
    done = run_all(f"{recipe} --out {tmp_path}/out -k 3 --dry-run -- --max-model-len 512")
    verbs = [line.split()[1] for line in done.stdout.splitlines()]
    assert verbs == ["quantize", "check", "serve-check", "eval", "bench", "gate", "card"], (
        done.stderr
    )
    assert (
        f"keepmtp bench {tmp_path / 'out'} -k 0..3 -- --max-model-len 512"
        in done.stdout.splitlines()
    )


@pytest.mark.full
def test_closeness_runs_where_the_recipe_has_a_limit_or_a_text_is_named(tmp_path):
    """And a recipe with a limit is refused before anything runs, where no text is known for its
    model.
    """
    out, text = tmp_path / "out", tmp_path / "held_out.txt"
    text.write_text("Some text.")
    done = run_all(f"tiny-glm4-moe --out {out} --text {text} --no-serve-check --dry-run")
    assert done.stdout.splitlines()[-2:] == [
        f"keepmtp closeness {out} --text {text}",
        f"keepmtp card {out}",
    ]
    recipe = find_recipe("tiny-glm4-moe")[0].model_dump(mode="json", exclude_none=True)
    for model, words in (("tiny-glm4-moe", [f"keepmtp closeness {out}"]), ("mine", [])):
        path = tmp_path / f"{model}.yaml"
        changed = {"model": model, "calibration": None, "gates": {"max_flips": 0.1}}
        path.write_text(json.dumps(recipe | changed))
        done = run_all(f"{path} --out {out} --dry-run")
        assert [
            line for line in done.stdout.splitlines() if line.startswith("keepmtp closeness")
        ] == words, done.stderr
    assert (
        done.returncode == 2
        and "--text: names the held-out text to compare on; got none" in done.stderr
    )


def test_the_place_of_the_mtp_block_reaches_quantize(tmp_path):
    done = run_all(f"minimax-m3 --mtp-source org/block --out {tmp_path}/out --dry-run")
    assert (
        f"keepmtp quantize minimax-m3 --mtp-source org/block --out {tmp_path / 'out'}"
        in done.stdout.splitlines()
    )


@pytest.mark.full
def test_words_for_vllm_reach_every_server(tmp_path):
    out = tmp_path / "out"
    words = f"tiny-glm4-moe --out {out} --any-vllm --dry-run -- --tensor-parallel-size 8"
    commands = run_all(words).stdout.splitlines()
    assert [line for line in commands if line.endswith(" -- --tensor-parallel-size 8")] == [
        f"keepmtp {verb} {out} --any-vllm -- --tensor-parallel-size 8"
        for verb in ("serve-check", "eval")
    ]
    assert f"keepmtp check {out} --record --gpu sm90 --gpu sm100 --any-vllm" in commands
    for refused in (["--port", "1"], ["another-model"]):
        done = run_all(f"tiny-glm4-moe --out {out} --", *refused)
        assert (
            done.returncode == 2
            and f"got {'also ' * (refused[0][0] != '-')}{refused[0]}" in done.stderr
        )
    assert not out.exists()


@pytest.mark.parametrize("target", ["all", "validate", "validate EVAL=gsm8k"])
def test_words_for_vllm_reach_it_through_make(target):
    words = f"--no-print-directory -n {target} OUT=x K=3".split()
    done = make(*words, "VLLM_ARGS=--tensor-parallel-size 8")
    line = " ".join(done.stdout.replace("\\\n", " ").splitlines()[-1].split())
    assert re.search(r"keepmtp .*-k 3 -- --tensor-parallel-size 8$", line), done.stdout


def test_a_finished_output_is_not_quantized_again(made):
    done = run_all(f"tiny-glm4-moe --scheme W8A16 --out {made} --no-serve-check --dry-run")
    assert [line.split()[1] for line in done.stdout.splitlines()] == ["check", "eval", "card"]


def test_an_output_of_another_recipe_is_refused(made):
    done = run_all(f"tiny-glm4-moe --out {made}")
    words = " ".join(done.stderr.split())
    assert done.returncode == 2
    assert "must be one of tiny-glm4-moe.w4a16-fp8, whose variant is w4a16-fp8; got w8a16" in words
    assert "$ keepmtp" not in words, "before anything runs"


@pytest.mark.parametrize("record", [None, "", '{"recipe": 1}'])
def test_a_folder_of_somebody_else_is_refused(tmp_path, record):
    (tmp_path / "keepmtp.json" if record is not None else tmp_path / "notes").write_text(
        record or ""
    )
    done = run_all(f"tiny-glm4-moe --out {tmp_path}")
    assert done.returncode == 2 and "must be one of this recipe" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_other_gates_do_not_make_another_checkpoint(made, tmp_path):
    """They judge the bytes and change none; another scheme does."""
    text = (made / "recipe.yaml").read_text()
    recipe = tmp_path / "recipe.yaml"
    words = f"{recipe} --scheme W8A16 --out {made} --dry-run"
    recipe.write_text(text + "gates:\n  max_drop: 0.05\n")
    done = run_all(words)
    assert done.returncode == 0, done.stderr
    recipe.write_text(text.replace("dense_mlp: FP8_BLOCK", "dense_mlp: bf16"))
    done = run_all(words)
    assert done.returncode == 2 and "whose backbone is" in " ".join(done.stderr.split())


@pytest.mark.full
def test_what_evaluates_is_asked_before_anything_is_quantized(tmp_path):
    """Neither a missing vLLM nor a dataset without answers is found out after hours."""
    out = tmp_path / "out"
    done = run_all(f"tiny-glm4-moe --out {out}", VLLM_PYTHON=str(tmp_path / "none"))
    assert done.returncode == 2 and "none" in done.stderr and not out.exists()
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"question": "1 + 1?", "reply": "#### 2"}) + "\n")
    recipe = tmp_path / "recipe.yaml"
    text = find_recipe("tiny-glm4-moe.w4a16-fp8")[1]
    recipe.write_text(text.replace("models/held_out.jsonl", str(rows)))
    done = run_all(f"{recipe} --out {out}")
    assert done.returncode == 2 and "rows.jsonl:1: must have the field answer" in " ".join(
        done.stderr.split()
    ), done.stderr
    assert not out.exists() and not out.with_name("out.partial").exists()
