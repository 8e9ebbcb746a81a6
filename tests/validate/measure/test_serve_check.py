"""What eval finds by acceptance and lossless, on servers that answer what they are told to."""

import json
import shutil

import cards
import pytest
from commands import GLM, keepmtp
from data_files import put_json
from keepmtp.validate.facts.results import report_folder
from keepmtp.validate.report.report import read_json, verify
from stub_vllm import stub_vllm


def said(text: str) -> dict[str, str]:
    """A server's answers, of two tokens."""
    likeliest = [{"token_id:1": -0.1}, {"token_id:2": -0.1}]
    choice = {"text": text, "token_ids": [1, 2], "logprobs": {"top_logprobs": likeliest}}
    tokens = {"tokens": [1, 2]}
    return {
        "/v1/completions": json.dumps({"choices": [choice]}),
        "/detokenize": json.dumps({"prompt": text}),
        "/tokenize": json.dumps(tokens),
        "/metrics": "vllm:spec_decode_num_drafts_total 0\n",
        "/health": "{}",
    }


@pytest.mark.full
def test_cut_characters(tmp_path):
    """In the answers of the checkpoint, or with MTP on, alone: each a regression that the terminal,
    the report and the page have. The same command asks nothing again.
    """
    python = str(stub_vllm(tmp_path, start=0))
    folders = [shutil.copytree(GLM, tmp_path / name) for name in ("source", "made", "drafted")]
    for number, folder in enumerate(folders):
        (folder / "number.txt").write_text(f"{number}")
        put_json(folder / "answers.json", said("1"))
    source, made, drafted = folders
    put_json(made / "answers.json", said("a\ufffdb"))
    put_json(drafted / "drafted.json", said("a\ufffdb"))
    for folder, named, whose in (
        (made, source, "of the checkpoint"),
        (drafted, "none", "with MTP on"),
    ):
        words = f"eval {folder} --only acceptance,lossless --source {named}"
        done = keepmtp(words, VLLM_PYTHON=python, status=1)
        says = f"Asked one at a time, 56 answers {whose} alone have a fault of characters (Arabic, "
        assert says in " ".join(done.stdout.split())
        out = tmp_path / f"{folder.name}.report"
        report = read_json(out / "report.json")
        assert report.judgement is not None and report.lossless is not None
        (reason,) = [one for one in report.judgement.reasons if one.gate == "lossless"]
        assert reason.verdict == "regression" and reason.says.startswith(says)
        for one in report.lossless.checkpoint.asked[-2:]:
            assert len(one.seen["characters"]) == 56 and one.way in ("one at a time", "32 at once")
            assert one.num_changed == 56 * (whose == "with MTP on")
    (tmp_path / "python").write_text("no vLLM any more")
    assert keepmtp(words, VLLM_PYTHON=python)


def test_answers_with_another_target_do_not_count(tmp_path):
    """A draft of its own is asked anew with each target, and the last one is its evidence."""
    draft = cards.draft(tmp_path / "draft")
    shutil.rmtree(f"{draft}.report")
    python = str(stub_vllm(tmp_path, start=0))
    own = cards.checkpoint(tmp_path / "own")
    evidence = cards.evidence(own)
    words = f"eval {GLM} --draft {own} --source none --only acceptance"
    done = keepmtp(words, VLLM_PYTHON=python, status=2)
    says = "eval.json: must be measured with the same target as the others"
    assert says in done.stderr and verify(evidence).target is None, "nothing of it is lost"
    for text in ("1", "2", "1"):
        target = tmp_path / f"target{text}"
        if not target.is_dir():
            shutil.copytree(GLM, target)
            put_json(target / "answers.json", said(text))
        words = f"eval {target} --draft {draft} --source none"
        keepmtp(words, VLLM_PYTHON=python, status=0)
        report = verify(report_folder(draft))
        assert report.serve is not None and report.lossless is not None
        assert report.target is not None and report.target.path == str(target)
        files = report_folder(draft).glob("serve.checkpoint.*.jsonl")
        asked = [lines for file in files if report.target.sha256 in (lines := file.read_text())]
        assert [f'"text":"{text}"' in lines for lines in asked] == [True, True]
        assert report.facts.num_tensors == 34 and not report_folder(target).exists()
