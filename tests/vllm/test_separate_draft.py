"""A draft of its own, with its target: in vLLM's classes, and served."""

import json
import re
import shutil
import signal
from pathlib import Path

import httpx
import pytest
from checkpoint_files import write
from commands import GLM, free_port, keepmtp, started
from good import ours, outputs_of, released
from keepmtp import api
from keepmtp.pipeline import plan_for
from keepmtp.recipes.errors import GateError, RecipeError
from keepmtp.validate.check.check import examine
from keepmtp.validate.check.pair import with_draft
from keepmtp.validate.dryload.check_on import check_on, with_loads
from keepmtp.validate.dryload.loader import Job
from keepmtp.validate.facts.findings import Finding, errors_of
from keepmtp.validate.facts.vllm_env import find_vllm
from keepmtp.validate.measure.texts import PROMPTS
from keepmtp.validate.publish.upload import prepare
from processes import until
from real_vllm import NEEDS_VLLM, QWEN, UNIPROC, VLLM_PYTHON, answers_of_source
from safetensors.torch import load_file, save_file
from wheel import stranger

pytestmark = NEEDS_VLLM
MODELS = ["glm-4.7", "glm-5", "deepseek-v3.1", "qwen3.5-27b", "mimo-7b", "nemotron-3-super"]
MODELS += ["inkling", "hy3", "exaone-4.5-33b", "dots3-note-prev"]


def made(place, model: str, mtp: str, format: str = "compressed-tensors"):
    """A target, and the draft that a plan makes for it from the release."""
    release = write(place / "release", released(model))
    target = write(place / "target", ours(model, "NVFP4A16", mtp, format=format))
    plan, _ = plan_for(str(release), draft_for=str(target), mtp=mtp, requantize=True)
    return target, outputs_of(plan)


@pytest.mark.full
@pytest.mark.parametrize("format", ["compressed-tensors", "modelopt"])
@pytest.mark.parametrize("mtp", ["bf16", "NVFP4A16"])
def test_every_pair_loads(mtp, format, tmp_path, dry_loader):
    pairs = {}
    for model in MODELS:
        try:
            target, draft = made(tmp_path / model, model, mtp, format)
        except RecipeError as refusal:
            assert model in ("inkling", "deepseek-v3.1", "nemotron-3-super", "dots3-note-prev"), (
                refusal
            )
            continue
        pairs[model] = target, write(tmp_path / model / "draft", draft)
    assert len(pairs) >= len(MODELS) - 4
    jobs = [Job(folder=target, draft=draft) for target, draft in pairs.values()]
    for account, (target, draft) in zip(
        dry_loader("sm90").load_all(jobs), pairs.values(), strict=True
    ):
        checked = with_loads(with_draft(examine(target), examine(draft)), [account])
        assert checked.data.ok, (target, checked.data.findings)
        assert account.load.draft.num_written == account.load.draft.num_params > 5


@pytest.mark.full
@pytest.mark.parametrize("model", ["deepseek-v3.1", "mimo-v2-flash"])
@pytest.mark.parametrize("mtp", ["source", "FP8_BLOCK"])
def test_a_pair_in_native_blocks_loads(mtp, model, tmp_path):
    """In each of two versions; a draft that has lost a scale does not."""
    release = str(write(tmp_path / "release", released(model)))
    plan, _ = plan_for(release, draft_for=release, mtp=mtp, requantize=True)
    draft = outputs_of(plan)
    good = str(write(tmp_path / "good", draft))
    draft.take(r".*mlp\.(experts\.1\.)?down_proj\.weight_scale_inv")
    bad = str(write(tmp_path / "bad", draft))
    words = {"gpus": ["sm90"], "vllms": ["0.32.0", "0.33.0"]}
    found = api.check(release, draft=good, **words)
    assert found.ok, found.findings
    assert [(load.vllm, load.ok) for load in found.dry] == [("0.32.0", True), ("0.33.0", True)]
    assert all(load.draft.num_written == load.draft.num_params > 5 for load in found.dry)
    lost = errors_of(api.check(release, draft=bad, **words).findings)
    assert any("mlp" in each.where and "down_proj" in each.where for each in lost), lost


@pytest.mark.parametrize(
    ("model", "lost"),
    [
        ("dots3-note-prev", r".*mtp.*embed_tokens\.weight"),
        ("glm-4.7", r".*layers\.3\.eh_proj\.weight"),
    ],
)
def test_a_lost_tensor_is_named(model, lost, tmp_path):
    """An embedding that the draft keeps, and what every draft needs."""
    target, draft = made(tmp_path, model, "bf16")
    (name,) = draft.take(lost)
    errors = errors_beside(target, write(tmp_path / "draft", draft))
    found = {each.origin for each in errors if name.startswith(each.where)}
    assert found == {"static", "dry"}, errors


def test_another_width_is_named(tmp_path):
    """By the static check the key, by vLLM a tensor."""
    target, _ = made(tmp_path / "own", "glm-4.7", "bf16")
    wide = str(write(tmp_path / "wide", released("glm-4.7", hidden_size=512)))
    with pytest.raises(GateError, match="hidden_size is 512, and 256 in the target"):
        plan_for(wide, draft_for=str(target), mtp="bf16")
    plan, _ = plan_for(wide, draft_for=wide, mtp="bf16")
    errors = errors_beside(target, write(tmp_path / "draft", outputs_of(plan)))
    assert [each.rule for each in errors if each.origin == "static"] == ["pair"]
    assert any("model.layers.3." in each.where for each in errors if each.origin == "dry"), errors


def errors_beside(target: Path, draft: Path) -> list[Finding]:
    """What the check and vLLM find of the two."""
    (checked,) = check_on([str(target)], vllms=[find_vllm()], gpus=["sm90"], draft=str(draft))
    return errors_of(checked.data.findings)


def served(words: str, folder: Path) -> tuple[list[str], dict[str, float]]:
    """What a server answers, and how many tokens it drafted and accepted."""
    port = free_port()
    log = folder / f"log{port}"
    changes = {"VLLM_PYTHON": str(VLLM_PYTHON), "OMP_NUM_THREADS": "1"}
    line = f"serve {words} -k 1 --port {port} -- --max-model-len 512 --served-model-name own"
    with log.open("w") as file:
        process = started(line, env=stranger(**changes), stdout=file, stderr=file)
    until(
        lambda: "Application startup complete" in log.read_text(),
        seconds=400,
        pause=0.1,
        by=process,
    )
    url = f"http://127.0.0.1:{port}"
    texts = []
    for prompt in PROMPTS[:4]:
        body = {"model": "own", "prompt": prompt, "max_tokens": 48, "temperature": 0.0}
        reply = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
        texts.append(reply.json()["choices"][0]["text"])
    metrics = httpx.get(f"{url}/metrics", timeout=120).text
    counter = r"vllm:spec_decode_num_(drafts|accepted_tokens)_total\{.*\} (\S+)"
    counts = {name: float(count) for name, count in re.findall(counter, metrics)}
    process.send_signal(signal.SIGINT)
    process.wait(timeout=120)
    return texts, counts


def serve_check(draft: Path, status: int) -> dict:
    """What real servers of the model with this draft say."""
    words = f"eval {GLM} --draft {draft} --source {GLM} --only acceptance --json --timeout 400 --"
    changes = {"VLLM_PYTHON": str(VLLM_PYTHON), "OMP_NUM_THREADS": "1"}
    found = json.loads(keepmtp(words, *UNIPROC, status=status, **stranger(**changes)).stdout)
    return found | found["serve"]


@pytest.mark.full
def test_a_draft_is_measured_and_ready_to_publish(tmp_path):
    """And its twin with one weight turned round, which vLLM loads without a word, is not."""
    draft = tmp_path / "draft"
    keepmtp(f"quantize {GLM} --draft-for {GLM} --mtp bf16 --out {draft}", status=0)
    found = serve_check(draft, 0)
    kept = json.loads((tmp_path / "draft.report/serve.json").read_text())
    assert Path(kept["target"]["path"]) == GLM
    run = found["checkpoint"]["runs"][1]
    assert run["drafts"] > 20 and run["acceptance"] > 0.85
    assert f"'model': '{draft}'" in Path(run["log"]).read_text()
    reasons = {each["gate"]: each["verdict"] for each in found["judgement"]["reasons"]}
    assert reasons == dict.fromkeys(("findings", "loads", "acceptance"), "pass")
    keepmtp(f"card {draft}", status=0)
    assert prepare(draft).report.judgement.verdict == "pass"

    twin = shutil.copytree(draft, tmp_path / "twin")
    (shard,) = twin.glob("*.safetensors")
    tensors = load_file(shard)
    tensors["model.layers.3.eh_proj.weight"] = tensors["model.layers.3.eh_proj.weight"].flip(1)
    save_file(tensors, shard)
    answers_of_source(draft, twin)
    found = serve_check(twin, 1)
    assert found["checkpoint"]["runs"][1]["acceptance"] < 0.2
    keepmtp(f"card {twin}", status=0)
    with pytest.raises(GateError, match=r"drafted tokens accepted, 100\.00 % of the source"):
        prepare(twin)


@pytest.mark.full
def test_a_server_drafts_as_with_the_targets_own_block(tmp_path):
    """By `serve`; of tiny-glm4-moe, acceptance beside that of the source is measured above."""
    keepmtp(f"quantize {QWEN} --draft-for {QWEN} --mtp bf16 --out {tmp_path}/draft")
    texts, own = served(f"{QWEN}", tmp_path)
    texts_apart, apart = served(f"{QWEN} --draft {tmp_path}/draft", tmp_path)
    assert own["drafts"] > 20 and texts_apart == texts
    rates = [counts["accepted_tokens"] / counts["drafts"] for counts in (own, apart)]
    assert abs(rates[1] - rates[0]) < 0.03
