"""`keepmtp check --gpu` as people use it: folders and Hub ids, good and broken, with and without a
vLLM to ask.
"""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from checkpoint_files import Checkpoint, lose, write
from commands import keepmtp, refused
from data_files import table
from dry_corpus import broken_cases
from good import llmcompressor, ours, released
from keepmtp.recipes.errors import RecipeError, VLLMError
from keepmtp.validate.dryload.check_on import Checked, check_on
from keepmtp.validate.dryload.loader import DryLoader, Job
from keepmtp.validate.facts.results import CheckData
from keepmtp.validate.facts.vllm_env import find_vllm
from releases import source_layout, target_of, write_checkpoint

pytestmark = pytest.mark.vllm

FOUND = table("vllm/test_check_on")


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("good") / "glm", ours("glm-4.7", "NVFP4"))


@pytest.fixture(scope="module")
def silent(tmp_path_factory) -> Path:
    """A BF16 MTP layer that the FP8 group claims: vLLM loads it without a word."""
    checkpoint = llmcompressor("glm-4.7", "FP8_DYNAMIC")
    kept = [entry for entry in checkpoint.quantization["ignore"] if "layers.3" not in entry]
    checkpoint.quantization["ignore"] = kept
    return write(tmp_path_factory.mktemp("silent") / "glm", checkpoint)


def on_sm100(*checkpoints: Path | str, draft: Path | str = "") -> list[Checked]:
    paths = [str(checkpoint) for checkpoint in checkpoints]
    return [*check_on(paths, vllms=[find_vllm()], gpus=["sm100"], draft=str(draft))]


def renamed() -> Checkpoint:
    checkpoint = ours("deepseek-r1", "NVFP4", "NVFP4")
    checkpoint.rename(
        r"model\.layers\.3\.self_attn\.o_proj\.weight_packed",
        "model.layers.3.self_attn.o_proj.weights",
    )
    return checkpoint


def of_type(model_type: str, architecture: str) -> Checkpoint:
    checkpoint = released("glm-4.7")
    checkpoint.config |= {"model_type": model_type, "architectures": [architecture]}
    return checkpoint


def without_norm() -> Checkpoint:
    checkpoint = released("qwen3.5-text")
    lose(r"mtp\.layers\.0\.self_attn\.q_norm\.weight")(checkpoint)
    checkpoint.config["quantization_config"] = ours("qwen3.5-text", "FP8_DYNAMIC").quantization | {
        "config_groups": {}
    }
    return checkpoint


@pytest.fixture(scope="module")
def judged(silent, tmp_path_factory) -> dict[str, CheckData]:
    """What is found on sm100; a vLLM takes 10 s to start, so one judges all."""
    made = {
        "renamed": renamed(),
        "llama": of_type("llama", "LlamaForCausalLM"),
        "unknown": of_type("never_seen", "NeverSeenForCausalLM"),
        "lost": without_norm(),
    }
    place = tmp_path_factory.mktemp("judged")
    folders = {"silent": silent} | {
        name: write(place / name, checkpoint) for name, checkpoint in made.items()
    }
    found = on_sm100(*folders.values())
    return {name: checked.data for name, checked in zip(folders, found, strict=True)}


@pytest.mark.full
def test_one_call_judges_all_checkpoints_on_all_gpus(good, silent):
    """JSON for machines, one line a checkpoint; a later one is judged although an earlier one
    failed.
    """
    done = keepmtp(f"check {silent} {good} --gpu sm100 --gpu sm90 --tp 1 --tp 2 --json", status=1)
    broken, whole = (json.loads(line) for line in done.stdout.splitlines())
    assert not broken["ok"] and whole["ok"] and whole["findings"] == []
    places = [(load["gpu"], load["tp"]) for load in whole["dry"]]
    assert places == [("sm90", 1), ("sm90", 2), ("sm100", 1), ("sm100", 2)]
    for load in whole["dry"]:
        assert load["loads"]
        for side in (load["target"], load["draft"]):
            assert side["written"] == side["parameters"] > 10
        assert load["draft"]["class"] == "Glm4MoeMTP"
        assert load["draft"]["shared"] == [
            "model.embed_tokens.weight",
            "model.layers.3.shared_head.head.weight",
        ]
        kernels = " ".join(kernel["kernel"] for kernel in load["target"]["kernels"])
        assert "NvFp4" in kernels or "Marlin" in kernels


@pytest.mark.parametrize("name", FOUND)
def test_what_is_found(name, judged):
    """The entry or tensor on disk and the cure; vLLM's own words where it raises; without a family
    vLLM's verdict and the account alone, and of a lost norm, whose shape the static check has no
    evidence of, the account too.
    """
    findings = judged[name].findings
    rows = FOUND[name]
    assert {finding.severity for finding in findings} == {"error"}
    for finding, (rule, where, words) in zip(findings, rows, strict=True):
        assert (finding.rule, Path(finding.where).name) == (rule, where)
        assert re.search(words, f"{finding.says}; {finding.cure}"), finding


def test_a_repository_is_judged_by_range_requests(good, serve_hub):
    """The verdict of the folder; of the weights' files nothing but the beginning is asked for."""
    requests = serve_hub(good)
    [(remote, *_), (local, *_)] = on_sm100("org/model", good)
    assert (
        remote.ok
        and remote.dry[0].target == local.dry[0].target
        and remote.dry[0].draft == local.dry[0].draft
    )
    weights = [line for line in requests if ".safetensors " in line]
    assert weights and all("bytes=0-" in line for line in weights)


@pytest.fixture(scope="module")
def assistant(tmp_path_factory) -> tuple[Path, Path]:
    """Gemma 4: a target, and a draft with a checkpoint of its own."""
    folder = tmp_path_factory.mktemp("gemma")
    config, tensors = source_layout("gemma-4-26b-assistant", size="tiny")
    target = write_checkpoint(folder / "target", *target_of(config))
    return target, write_checkpoint(folder / "assistant", config, tensors)


def test_a_draft_of_its_own_is_loaded_beside_its_target(assistant, tmp_path):
    """And its twin, which lost a tensor, is told by its own names."""
    target, draft = assistant
    [(report, *_)] = on_sm100(target, draft=draft)
    assert report.ok, report.findings
    assert report.dry[0].draft.cls == "Gemma4MTP" and report.dry[0].draft.num_written > 10
    alone, again = on_sm100(draft, target, draft=draft)
    assert isinstance(alone.refusal, RecipeError) and "--draft" in alone.refusal.cure
    assert again.refusal is None and again.data.ok, "a refusal does not end the batch"
    config, tensors = source_layout("gemma-4-26b-assistant", size="tiny")
    lost = "model.layers.1.self_attn.q_proj.weight"
    kept = {name: spec for name, spec in tensors.items() if name != lost}
    draft = write_checkpoint(tmp_path / "assistant", config, kept)
    [(report, *_)] = on_sm100(target, draft=draft)
    assert any(lost in f"{each.where} {each.says}" for each in report.findings) and not report.ok


# --- Bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "python", "says"),
    [
        ("--gpu sm100", "/nowhere", "make"),
        ("--gpu sm100", sys.executable, "vLLM"),
        ("--gpu sm75", "", "sm80, sm86, sm89, sm90, sm100, sm120; got sm75"),
        ("-k 2", "", "--gpu"),
    ],
)
def test_what_is_needed_is_said(words, python, says, good, monkeypatch):
    if python:
        monkeypatch.setenv("VLLM_PYTHON", python)
    refused(f"check {good} {words}", says=says)
    assert python != "/nowhere" or keepmtp(f"check {good}").returncode == 0


def test_a_vllm_that_cannot_pretend_is_told_with_its_last_words(good, tmp_path):
    """A Python that dies at once stands for any version whose modules are elsewhere."""
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho 'ImportError: no module named vllm.platforms' >&2\nexit 1\n")
    script.chmod(0o755)
    with (
        pytest.raises(
            VLLMError, match=r"pretended sm100; got .*ImportError: no module named vllm\.platforms"
        ),
        DryLoader(replace(find_vllm(), python=script), gpu="sm100") as loader,
    ):
        loader.load_all([Job(folder=good)])


def test_a_version_that_does_not_start_is_told_and_the_others_judge(good, tmp_path):
    """Its own `vllm` is imported over the environment's packages, by the name that it has."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text(
        "import importlib.metadata as m\nimport torch\n"
        "raise ImportError(f'{m.version(\"vllm\")} wants another torch than {torch.__version__}')\n"
    )
    own = find_vllm()
    broken = replace(own, site=tmp_path, version="9.9.9")
    with pytest.raises(VLLMError) as caught:
        list(check_on([str(good)], vllms=[broken], gpus=["sm100"]))
    said = str(caught.value)
    assert f"ImportError: 9.9.9 wants another torch than {own.torch}" in said
    assert str(own.python) in said and "set VLLM_PYTHON to one made for vLLM 9.9.9" in said
    assert not list(tmp_path.rglob("__pycache__")), "nothing is written into a folder of others"
    (checked,) = check_on([str(good)], vllms=[broken, own], gpus=["sm100"])
    assert [load.vllm for load in checked.data.dry] == [own.version] and checked.data.ok
    assert [str(error) for error in checked.unjudged] == [said]


def test_what_stops_over_other_packages_is_not_judged(good, silent, tmp_path):
    """Unless the static check or a known defect of vLLM says why; what loads is judged."""
    own = find_vllm()
    older = replace(own, version="0.31.0", unmet="transformers<5.18, not 5.19.0")
    case = next(case for case in broken_cases() if case.name == "R2 other layers attend")
    paths = [str(good), str(silent), str(write(tmp_path / "lost", case.build()))]
    found = list(check_on(paths, vllms=[older, own], gpus=["sm100"]))
    assert [len(checked.data.dry) for checked in found] == [2, 2, 1]
    assert found[0].unjudged == found[1].unjudged == ()
    (error,) = found[2].unjudged
    said = "vLLM 0.31.0: requires transformers<5.18, not 5.19.0, to be judged; got model.layers."
    assert str(error).startswith(said) and "Set VLLM_PYTHON" in str(error)
