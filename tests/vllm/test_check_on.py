"""`keepmtp check --gpu` as people use it: folders and Hub ids, good and broken, with and without a
vLLM to ask.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from checkpoint_files import Checkpoint, lose, write
from good import llmcompressor, ours, released
from keepmtp.recipes.errors import RecipeError, VLLMError
from keepmtp.validate.dryload.check_on import check_on
from keepmtp.validate.dryload.loader import DryLoader, Job
from keepmtp.validate.facts.results import CheckData
from keepmtp.validate.facts.vllm_env import find_vllm
from releases import source_layout, target_of, write_checkpoint

KEEPMTP = str(Path(sys.executable).with_name("keepmtp"))
pytestmark = pytest.mark.vllm


def keepmtp(*words: str, **changes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [KEEPMTP, *words], capture_output=True, text=True, env=os.environ | changes
    )


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
    found = check_on([str(folder) for folder in folders.values()], vllm=find_vllm(), gpus=["sm100"])
    return {name: checked.data for name, checked in zip(folders, found, strict=True)}


@pytest.mark.full
def test_one_call_judges_all_checkpoints_on_all_gpus(good, silent):
    """JSON for machines, one line a checkpoint; a later one is judged although an earlier one
    failed.
    """
    words = ["--gpu", "sm100", "--gpu", "sm90", "--tp", "1", "--tp", "2", "--json"]
    done = keepmtp("check", str(silent), str(good), *words)
    broken, whole = (json.loads(line) for line in done.stdout.splitlines())
    assert done.returncode == 1 and not broken["ok"] and whole["ok"] and whole["findings"] == []
    assert [(load["gpu"], load["tp"], load["loads"]) for load in whole["dry"]] == [
        ("sm90", 1, True),
        ("sm90", 2, True),
        ("sm100", 1, True),
        ("sm100", 2, True),
    ]
    for load in whole["dry"]:
        for side in (load["target"], load["draft"]):
            assert side["written"] == side["parameters"] > 10
        assert load["draft"]["class"] == "Glm4MoeMTP"
        assert load["draft"]["shared"] == [
            "model.embed_tokens.weight",
            "model.layers.3.shared_head.head.weight",
        ]
        kernels = {
            kernel["kernel"].split()[0] for kernel in load["target"]["kernels"] if kernel["kernel"]
        }
        assert any("NvFp4" in kernel or "Marlin" in kernel for kernel in kernels), kernels


def test_what_vllm_leaves_unsaid_is_found_by_the_account_alone(silent, dry_loader):
    """No rule of the static check is asked: parameters that keep their placeholder, weights cast
    into eight bits.
    """
    account = dry_loader("sm100").load_all([Job(folder=silent)])[0]
    assert account.load.failure is None
    assert {fault.param for fault in account.draft.faults} >= {
        "model.layers.3.mtp_block.self_attn.qkv_proj.weight_scale",
        "model.layers.3.mtp_block.mlp.shared_experts.down_proj.weight_scale",
    }
    cast = next(misfit for misfit in account.draft.misfits if "q_proj" in misfit.tensor)
    assert (cast.given, cast.wanted) == ("bfloat16", "float8_e4m3fn")


def test_findings_name_the_entry_on_disk_and_the_cure(judged):
    dry = [finding for finding in judged["silent"].findings if finding.rule == "dry-load"]
    assert any(finding.where.startswith("model.layers.3.self_attn.") for finding in dry)
    assert all("on sm100 at TP 1" in finding.says and finding.cure for finding in dry)
    assert any("acceptance is near 0 %" in finding.says for finding in dry)


def test_vllms_own_words_the_tensor_and_a_cure_where_it_raises(judged):
    (found,) = [finding for finding in judged["renamed"].findings if finding.rule == "dry-load"]
    assert found.where == "model.layers.3.self_attn.o_proj.weights"
    assert "KeyError" in found.says and "deepseek_mtp.py" in found.says and found.cure


def test_an_architecture_without_a_family_is_loaded_all_the_same(judged):
    """No table, so no static check and no names traced; vLLM's verdict and the account stand."""
    assert {finding.rule for finding in judged["llama"].findings} >= {"family", "dry-load"}
    found = judged["unknown"].findings
    assert any("never_seen" in finding.says and finding.rule == "dry-load" for finding in found)


def test_k_must_fit_the_mtp_layers(tmp_path):
    """MiMo-V2's three layers: vLLM takes a multiple of the count that config.json gives."""
    folder = write(tmp_path / "two", released("glm-4.7", num_nextn_predict_layers=2))
    [(report, *_)] = check_on([str(folder)], vllm=find_vllm(), gpus=["sm100"], num_drafts=3)
    assert any(
        "num_speculative_tokens" in finding.says and "-k" in finding.cure
        for finding in report.findings
    )


def test_tensor_parallel_sizes_that_do_not_divide_are_refused(tmp_path):
    config, tensors = source_layout("deepseek-r1", size="split")
    folder = write_checkpoint(tmp_path / "v3", config, tensors)
    [(report, *_)] = check_on([str(folder)], vllm=find_vllm(), gpus=["sm100"], tps=[4, 8])
    assert [verdict.failure is None for verdict in report.dry] == [True, False]
    (found,) = report.findings
    assert "at TP 8" in found.says and "not divisible by weight quantization block" in found.says
    assert "--tensor-parallel-size" in found.cure


def test_a_repository_is_judged_by_range_requests(good, serve_hub):
    """The verdict of the folder; of the weights' files nothing but the beginning is asked for."""
    requests = serve_hub(good)
    [(remote, *_), (local, *_)] = check_on(
        ["org/model", str(good)], vllm=find_vllm(), gpus=["sm100"]
    )
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


def test_a_draft_of_its_own_is_loaded_beside_its_target(assistant):
    target, draft = assistant
    [(report, *_)] = check_on([str(target)], vllm=find_vllm(), gpus=["sm100"], draft=str(draft))
    assert report.ok, report.findings
    assert report.dry[0].draft.cls == "Gemma4MTP" and report.dry[0].draft.num_written > 10
    alone, again = check_on(
        [str(draft), str(target)], vllm=find_vllm(), gpus=["sm100"], draft=str(draft)
    )
    assert isinstance(alone.refusal, RecipeError) and "--draft" in alone.refusal.cure
    assert again.refusal is None and again.data.ok, "a refusal does not end the batch"


def test_a_faulty_draft_of_its_own_is_told_by_its_names(assistant, tmp_path):
    """The twin: a tensor of the draft is lost."""
    target, _ = assistant
    config, tensors = source_layout("gemma-4-26b-assistant", size="tiny")
    lost = "model.layers.1.self_attn.q_proj.weight"
    draft = write_checkpoint(
        tmp_path / "assistant", config, {n: s for n, s in tensors.items() if n != lost}
    )
    [(report, *_)] = check_on([str(target)], vllm=find_vllm(), gpus=["sm100"], draft=str(draft))
    assert not report.ok and any(
        lost in f"{finding.where} {finding.says}" for finding in report.findings
    )


def test_a_lost_tensor_is_told_by_the_draft_and_by_nobody_else(judged):
    """The static check has no evidence of a norm's shape; the account sees memory that nobody
    wrote.
    """
    assert any(
        "q_norm" in finding.says
        for finding in judged["lost"].findings
        if finding.rule == "dry-load"
    )


# --- Bad input ------------------------------------------------------------------------------------


def refused(done: subprocess.CompletedProcess[str], *says: str) -> None:
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.startswith("error: ") and "Traceback" not in done.stderr
    for word in says:
        assert word in done.stderr


def test_without_a_vllm_one_is_told_how_to_get_it(good, tmp_path):
    refused(
        keepmtp("check", str(good), "--gpu", "sm100", VLLM_PYTHON=str(tmp_path / "no")),
        "VLLM_PYTHON",
        "make",
    )
    refused(keepmtp("check", str(good), "--gpu", "sm100", VLLM_PYTHON=sys.executable), "vLLM")
    assert (
        keepmtp(
            "check", str(good), "--gpu", "sm100", "--static-only", VLLM_PYTHON="/nowhere"
        ).returncode
        == 0
    )


def test_unknown_gpus_and_options_without_a_gpu(good):
    refused(keepmtp("check", str(good), "--gpu", "sm80"), "sm89, sm90, sm100, sm120", "sm80")
    refused(keepmtp("check", str(good), "--tp", "4"), "--gpu")


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
