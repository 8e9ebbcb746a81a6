"""The command as people type it: exit status, one-sentence errors, JSON for machines."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from commands import ROOT, keepmtp, keepmtp_without, refused
from keepmtp import __version__
from keepmtp.cli import main
from keepmtp.recipes.find import find_recipe
from killed import small_recipe
from releases import source_layout, write_checkpoint

AUTO = "tiny-glm4-moe.nvfp4-mtp-auto"


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    config, tensors = source_layout("glm-4.7", size="tiny")
    return write_checkpoint(
        tmp_path_factory.mktemp("cli") / "source", config, tensors, data="random"
    )


def test_quantize_then_check(source, tmp_path):
    done = keepmtp(f"quantize glm-4.7 --source {source} --out out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for wanted in ("check passed", "MTP block kept in BF16", "vllm serve", "--speculative-config"):
        assert wanted in done.stdout
    assert " tensors in, " in done.stderr
    checked = keepmtp(f"check out {source} --json", cwd=tmp_path)
    reports = [json.loads(line) for line in checked.stdout.splitlines()]
    assert checked.returncode == 0 and [report["ok"] for report in reports] == [True, True]
    assert reports[0]["findings"] == []
    again = f"quantize glm-4.7 --source {source} --out out"
    assert "out: finished before" in keepmtp(again, cwd=tmp_path).stdout
    refused(f"{again} --scheme FP8_BLOCK", says="never overwritten", cwd=tmp_path)


def test_dry_run_writes_nothing(source, tmp_path):
    done = keepmtp(f"quantize glm-4.7 --source {source} --dry-run --json", cwd=tmp_path)
    plan = json.loads(done.stdout)
    assert done.returncode == 0 and not list(tmp_path.iterdir())
    assert (
        plan["mtp_layers"] == 1
        and plan["quantization_config"]["quant_method"] == "compressed-tensors"
    )
    assert plan["bytes"]["after"] < plan["bytes"]["before"]
    assert {row["fate"] for row in plan["groups"] if row["part"] == "mtp"} == {"keep"}


def test_plan_is_for_people_too(source):
    done = keepmtp(f"plan glm-4.7 --source {source}")
    assert done.returncode == 0, done.stderr
    for wanted in ("experts", "eh_proj as a plain nn.Linear", "ignore", "MTP layer"):
        assert wanted in " ".join(done.stdout.split()), wanted
    assert re.search(r"^\S.*tensors in, .* out; .* -> .* MTP layer$", done.stdout, re.MULTILINE), (
        "one line in a pipe"
    )
    assert re.search(r"^  ignore  re:\^model\\.layers\S+\$$", done.stdout, re.MULTILINE), (
        "never broken"
    )


# --- calibrated recipes ---------------------------------------------------------------------------


def test_a_dry_run_says_how_it_would_be_calibrated(tmp_path):
    model = str(ROOT / "models/tiny-glm4-moe")
    done = keepmtp(f"quantize {AUTO} --source {model} --dry-run --json", cwd=tmp_path)
    assert done.returncode == 0 and not list(tmp_path.iterdir()), done.stderr
    told = json.loads(done.stdout)["calibration"]
    assert (
        told["tokens"] == 32 * 128
        and told["min_acceptance"] == 0.97
        and "bf16" in told["candidates"]
    )
    assert told["mtp_pass"] == {"possible": True, "why": ""}
    plain = keepmtp(f"plan tiny-glm4-moe --source {model} --json")
    assert json.loads(plain.stdout)["calibration"] is None


@pytest.mark.parametrize(
    ("recipe", "says"),
    [
        (
            AUTO,
            [
                "minmax on 32 sequences of 128 tokens",
                "until then it is planned as bf16",
                "W4A16; NVFP4A16; NVFP4.",
            ],
        ),
        (
            "tiny-glm4-moe.w4a16-awq",
            ["awq on 32 sequences", "its acceptance is measured"],
        ),
        ("tiny-glm4-moe.w4a16-gptq", ["gptq on 32 sequences"]),
    ],
)
def test_a_plan_explains_calibration(recipe, says):
    done = keepmtp(f"plan {recipe} --source {ROOT}/models/tiny-glm4-moe")
    assert done.returncode == 0, done.stderr
    for wanted in says:
        assert wanted in " ".join(done.stdout.split()), wanted
    assert "Would be refused" not in done.stdout


def test_a_block_that_cannot_be_run_cannot_be_chosen(tmp_path):
    """Known from the family alone, so before a download."""
    config, tensors = source_layout("ring-2.5-1t", size="tiny")
    folder = write_checkpoint(tmp_path / "source", config, tensors)
    text = find_recipe("ring-2.5-1t.nvfp4a16-fp8")[1]
    calibration = find_recipe(AUTO)[1].partition("calibration:\n")[2]
    auto = "mtp: auto\nmtp_auto: {min_acceptance: 0.9, candidates: [bf16]}"
    text = re.sub(r"^mtp: .*$", auto, text, flags=re.MULTILINE)
    (tmp_path / "mine.yaml").write_text(
        text.replace("calibration: null", f"calibration:\n{calibration}")
    )
    done = keepmtp(f"plan mine.yaml --source {folder}", cwd=tmp_path)
    told = " ".join(done.stdout.split())
    assert "MTP pass: not possible, transformers has no class for Ling 2.5's layers" in told, (
        done.stderr
    )
    assert "Would be refused: ring-2.5-1t" in told
    refused(
        f"quantize mine.yaml --source {folder}",
        says="must be one that can be run",
        cwd=tmp_path,
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.full
def test_what_is_not_installed_is_one_sentence(source, tmp_path):
    words = f"{AUTO} --source {ROOT}/models/tiny-glm4-moe"
    heavy = ("datasets", "llmcompressor", "transformers")
    done = keepmtp_without(heavy, f"quantize {words}", cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and not list(tmp_path.iterdir())
    absent = "got no datasets and no llmcompressor and no transformers"
    assert f"{absent}. Run {sys.executable} -m pip install 'keepmtp[calibrate]'" in done.stderr
    other = re.search(r"or use --scheme (\S+), which needs no batches", done.stderr)
    assert other, done.stderr
    free = f"quantize {words} --scheme {other[1]} --out out"
    done = keepmtp_without(heavy, free, cwd=tmp_path)
    assert done.returncode == 0 and "check passed" in done.stdout, done.stderr
    done = keepmtp_without(("torch", *heavy), f"plan {words}", cwd=tmp_path)
    assert done.returncode == 0 and "Would be refused: calibration for" in done.stdout, done.stderr
    words = f"quantize glm-4.7 --source {source} --out no"
    done = keepmtp_without(("torch",), words, cwd=tmp_path)
    assert done.returncode == 2 and "-m pip install 'keepmtp[quantize]'." in done.stderr


def without_free_memory(plan: str) -> str:
    """Memory that is free is another number in each process."""
    return re.sub(r"[\d.]+ GiB free", "", plan)


@pytest.mark.full
def test_only_the_first_of_several_processes_speaks(tmp_path):
    words = f"quantize {AUTO} --source {ROOT}/models/tiny-glm4-moe --dry-run"
    quiet = keepmtp(words, RANK="1", WORLD_SIZE="2")
    assert quiet.returncode == 0 and quiet.stdout == quiet.stderr == ""
    spoken, alone = (
        keepmtp(words, **place).stdout
        for place in ({"RANK": "0", "WORLD_SIZE": "2"}, {"RANK": "3"})
    )
    assert without_free_memory(spoken) == without_free_memory(alone) != ""
    wrong = keepmtp(f"quantize {AUTO} --source absent", RANK="1", WORLD_SIZE="2")
    assert wrong.stderr.startswith("rank 1 of 2: error: ") and wrong.stderr.count("\n") == 1


@pytest.mark.full
def test_which_extra_a_recipe_needs():
    """What the Makefile installs before a run."""
    calibrated = [AUTO, "tiny-glm4-moe --scheme nvfp4", "tiny-glm4-moe.w4a16-gptq"]
    plain = ["tiny-glm4-moe", f"{AUTO} --scheme W4A16 --mtp bf16"]
    assert {keepmtp(f"extra {words}").stdout for words in calibrated} == {"calibrate\n"}
    assert {keepmtp(f"extra {words}").stdout for words in plain} == {"quantize\n"}


@pytest.mark.full
def test_a_back_end_has_an_extra_of_its_own(tmp_path):
    """Without it a run is one sentence, before any work; so is a sweep that several processes
    cannot share.
    """
    recipe = small_recipe(
        tmp_path, "tiny-glm4-moe.nvfp4", backend="modelopt", algorithm="local-hessian"
    )
    assert keepmtp(f"extra {recipe}").stdout == "modelopt\n"
    words = f"quantize {recipe} --out {tmp_path}/out"
    done = keepmtp_without(("nvidia-modelopt",), words, cwd=ROOT)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "needs keepmtp's `modelopt` extra; got no nvidia-modelopt. Run " in done.stderr
    done = keepmtp(words, RANK="0", WORLD_SIZE="2")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "algorithm: local-hessian must run in one process" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == [recipe.name]


@pytest.mark.full
def test_a_calibrated_run_for_machines(tmp_path):
    """A real one, short: progress as JSON lines, one JSON at the end, the same figures in
    report.json and the page.
    """
    text = find_recipe(AUTO)[1]
    text = re.sub(r"candidates:\n( +- .*\n)+", "candidates: [bf16, NVFP4]\n", text)
    for key, value in {
        "min_acceptance": 0.2,
        "samples": 8,
        "held_out": 16,
        "batch_size": 4,
    }.items():
        text = re.sub(rf"{key}: .*", f"{key}: {value}", text)
    (tmp_path / "mine.yaml").write_text(text)
    words = f"quantize mine.yaml --source {ROOT}/models/tiny-glm4-moe --out out --json"
    done = keepmtp(words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    steps = [json.loads(line) for line in done.stderr.splitlines()]
    assert [(step["step"], step["done"], step["total"]) for step in steps] == [
        *(("backbone", layer, 3) for layer in (1, 2, 3)),
        *(("mtp", policy, 2) for policy in (1, 2)),
    ]
    assert all(step["tokens_per_second"] > 0 and step["memory_gib"] > 0 for step in steps)
    assert steps[2]["eta_seconds"] == 0 < steps[0]["eta_seconds"]
    told = json.loads(done.stdout)
    assert (
        told["check"]["ok"]
        and told["plan"]["recipe"]["mtp"] == told["calibration"]["mtp"] == "NVFP4"
    )
    released, kept, quantized = told["calibration"]["rows"]
    assert 1 < released["perplexity"] < kept["perplexity"] * 1.05
    assert quantized["acceptance"]["by_position"]["1"][0] > 0.3
    assert [each["chosen"] for each in told["calibration"]["candidates"]] == [False, True]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.yaml", "out"], (
        "nothing of the run is left behind"
    )
    checked = keepmtp("check out --html page", cwd=tmp_path)
    assert checked.returncode == 0, checked.stderr
    assert (
        json.loads((tmp_path / "page" / "report.json").read_text())["calibration"]
        == told["calibration"]
    )
    assert "Candidates for the MTP block" in (tmp_path / "page" / "report.html").read_text()


def test_a_shipped_model_is_found_from_anywhere(tmp_path):
    assert keepmtp("plan tiny-glm4-moe", cwd=tmp_path).returncode == 0
    text = find_recipe("tiny-glm4-moe.w4a16-fp8")[1]
    (tmp_path / "mine.yaml").write_text(text.replace("models/tiny-glm4-moe", "models/tiny-glm5"))
    refused("plan mine.yaml", says="models/tiny-glm5: a checkpoint is a folder", cwd=tmp_path)


def test_a_broken_recipe_file(source, tmp_path):
    _, shipped = find_recipe("glm-4.7.w4a16-fp8")
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        shipped + "overrides:\n  - {modules: model.layers.99.mlp.gate_proj, scheme: bf16}\n"
    )
    refused(f"plan {recipe} --source {source}", says="model.layers.99.mlp.gate_proj")


def test_help_teaches():
    taught = " ".join(keepmtp("quantize --help").stdout.split())
    assert all(
        word in taught
        for word in ("--keep-calibration", "torchrun", "keepmtp[calibrate]", "held-out")
    )
    for verb in ("ls", "plan", "quantize", "check"):
        done = keepmtp(verb, "--help")
        assert done.returncode == 0 and len(done.stdout) > 300
        assert keepmtp(verb, "-h").stdout == done.stdout
    assert "[-- VLLM_OPTIONS]" in keepmtp("eval --help").stdout
    assert keepmtp("--version").stdout == keepmtp("-V").stdout == f"keepmtp {__version__}\n"
    assert keepmtp("--help").stdout == keepmtp().stderr


@pytest.mark.parametrize("verb", main.VERBS)
def test_help_keeps_what_is_in_backticks_whole(verb, monkeypatch):
    """At 80 columns: an example is pasted into a terminal."""
    monkeypatch.setenv("COLUMNS", "80")
    function = main.VERBS[verb].load()
    command = main._load(verb)
    shown = command.get_help(typer.Context(command))
    texts = [
        function.__doc__,
        *(option.help.translate(main._BROKEN) for option in command.params if option.help),
    ]
    for quoted in re.findall("`[^`]+`", " ".join(" ".join(texts).split())):
        assert quoted in shown, shown
    assert all(len(line) <= 80 for line in shown.splitlines() if "`" not in line)


def test_what_the_hub_warns_of_is_said_once():
    code = (
        "import logging; from keepmtp.cli import main as cli; cli._common(); "
        "logging.getLogger('huggingface_hub.x').warning('slow')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.count("slow") == 1, done.stderr
