"""The command as people type it: exit status, one-sentence errors, JSON for machines."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import source_layout, write_checkpoint

KEEPMTP = str(Path(sys.executable).with_name("keepmtp"))


def keepmtp(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([KEEPMTP, *words], capture_output=True, text=True, cwd=cwd)


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    config, tensors = source_layout("glm-4.7", size="tiny")
    return write_checkpoint(tmp_path_factory.mktemp("cli") / "source", config, tensors, data="random")


def refused(*words: str, says: str, status: int = 2, cwd: Path | None = None) -> None:
    done = keepmtp(*words, cwd=cwd)
    assert done.returncode == status, done.stdout + done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    assert "; got " in done.stderr and done.stderr.rstrip().endswith((".", "?"))
    assert says in done.stderr


def test_quantize_then_check(source, tmp_path):
    done = keepmtp("quantize", "glm-4.7", "--source", str(source), "--out", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "check passed" in done.stdout and "--speculative-config" in done.stdout
    checked = keepmtp("check", "out", str(source), "--json", cwd=tmp_path)
    reports = [json.loads(line) for line in checked.stdout.splitlines()]
    assert checked.returncode == 0 and [report["ok"] for report in reports] == [True, True]
    assert reports[0]["findings"] == []
    refused("quantize", "glm-4.7", "--source", str(source), "--out", "out", says="never overwritten", cwd=tmp_path)


def test_check_writes_a_page_on_request(source, tmp_path):
    done = keepmtp("check", str(source), "--html", str(tmp_path / "page"))
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "page" / "report.json").read_text())
    assert written["verdict"]["ok"] and written["facts"]["num_mtp_layers"] == 1
    assert "<html" in (tmp_path / "page" / "report.html").read_text()


def test_dry_run_writes_nothing(source, tmp_path):
    done = keepmtp("quantize", "glm-4.7", "--source", str(source), "--dry-run", "--json", cwd=tmp_path)
    plan = json.loads(done.stdout)
    assert done.returncode == 0 and not list(tmp_path.iterdir())
    assert plan["mtp_layers"] == 1 and plan["quantization_config"]["quant_method"] == "compressed-tensors"
    assert plan["bytes"]["after"] < plan["bytes"]["before"]
    assert {row["fate"] for row in plan["groups"] if row["part"] == "mtp"} == {"keep"}


def test_plan_is_for_people_too(source):
    done = keepmtp("plan", "glm-4.7", "--source", str(source))
    assert done.returncode == 0, done.stderr
    for wanted in ("experts", "eh_proj as a plain nn.Linear", "ignore", "MTP layer"):
        assert wanted in " ".join(done.stdout.split()), wanted


def test_listings():
    listing = json.loads(keepmtp("ls", "--json").stdout)
    assert {"models", "schemes", "families"} == set(listing)
    names = {row["recipe"].split(".")[0] for row in listing["models"]} | {r["recipe"] for r in listing["models"]}
    assert {"dsv4-flash", "tiny-glm4-moe"} <= names
    assert "NVFP4A16" in keepmtp("ls", "schemes").stdout
    refused("ls", "colours", says="must be one of models, schemes, families")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["glm-4.8"], "Did you mean glm-4."),
        (["glm-4.7", "--scheme", "NVFP5"], "must be a variant of glm-4.7"),
        (["glm-4.7", "--mtp", "fp16"], "must be one of source, bf16"),
        (["glm-4.7", "--source", "absent-folder"], "Check SOURCE"),
        (["nowhere.yaml"], "a recipe file must exist"),
        (["mimo-7b", "--source", "SOURCE"], "family must be that of"),
        (["glm-4.7", "--source", "SOURCE", "--scheme", "nvfp4-fp8"], "--scheme nvfp4a16-fp8"),
        (["glm-4.7", "--source", "SOURCE", "--out", "SOURCE/out"], "must lie outside the source"),
    ],
)
def test_bad_input_is_one_sentence(words, says, source, tmp_path):
    words = [word.replace("SOURCE", str(source)) for word in words]
    refused("quantize", *words, says=says, cwd=tmp_path)
    assert not list(tmp_path.iterdir()), "nothing is written before a refusal"


def test_a_shipped_model_outside_a_checkout_is_no_hub_id(tmp_path):
    refused("plan", "tiny-glm4-moe", says="models/tiny-glm4-moe: a source is a folder", cwd=tmp_path)


def test_a_broken_recipe_file(source, tmp_path):
    shipped = Path(__file__).parent.parent / "recipes/models/glm-4.7.w4a16-fp8.yaml"
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(shipped.read_text().replace("backbone:", "backbones:"))
    refused("plan", str(recipe), "--source", str(source), says="Did you mean backbone?")
    recipe.write_text(shipped.read_text() + "overrides:\n  - {modules: model.layers.99.mlp.gate_proj, scheme: bf16}\n")
    refused("plan", str(recipe), "--source", str(source), says="model.layers.99.mlp.gate_proj")


def test_a_check_that_fails_exits_with_1(source, tmp_path):
    config, tensors = source_layout("glm-4.7", size="tiny")
    layer = f"model.layers.{config['num_hidden_layers']}."
    write_checkpoint(tmp_path, config, {n: s for n, s in tensors.items() if not n.startswith(layer)})
    done = keepmtp("check", str(tmp_path), "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 1 and not report["ok"]
    assert any(layer in finding["where"] + finding["says"] for finding in report["findings"])


def test_help_teaches():
    for verb in ("ls", "plan", "quantize", "check"):
        done = keepmtp(verb, "--help")
        assert done.returncode == 0 and len(done.stdout) > 300
    assert keepmtp("--version").stdout.startswith("keepmtp ")
