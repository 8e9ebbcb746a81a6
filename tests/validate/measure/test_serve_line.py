"""What words for `vllm serve` say of drafting, and which of them no measurement takes."""

import json
import shlex
from pathlib import Path

import pytest
import releases
from keepmtp.checkpoints.source import Source, open_source
from keepmtp.recipes.errors import RecipeError
from keepmtp.validate.measure.harness import ks_up_to
from keepmtp.validate.measure.serve_line import (
    draft_words,
    refuse_pipeline,
    refuse_settings,
    separate_draft,
    serve_words,
)
from keepmtp.validate.measure.server import refuse_words


def test_ks():
    assert [ks_up_to(*most) for most in ((3, 1), (4, 2), (1, 3))] == [
        (0, 1, 2, 3),
        (0, 1, 2, 4),
        (0, 1),
    ]


@pytest.mark.parametrize(
    "word",
    [
        "--port",
        "--host=::",
        "--uds=/tmp/x",
        "--served_model_name",
        "--api-key=x",
    ],
)
def test_words_that_would_lock_keepmtp_out_are_refused(word):
    name = word.partition("=")[0].replace("_", "-")
    with pytest.raises(RecipeError, match=f"got {name}"):
        refuse_words("eval", ["--tensor-parallel-size", "8", word, "1"])
    refuse_words("eval", ["--tensor-parallel-size", "8"])


KEY = "--speculative-config."


def test_what_is_said_of_drafting_joins_the_other_settings():
    further = ["-tp", "8", f"{KEY}draft_lm_head_quantization", "fp8"]
    _, drafted, *others = draft_words(2, further)
    settings = {"method": "mtp", "num_speculative_tokens": 2, "draft_lm_head_quantization": "fp8"}
    assert json.loads(drafted) == settings and others == further[:2]
    assert draft_words(0, further) == ("-tp", "8")
    assert draft_words(2, [f"{further[2]}=fp8"]) == draft_words(2, further[2:])
    assert shlex.join(draft_words(1)).endswith('"num_speculative_tokens":1}\'')


@pytest.mark.parametrize(
    "setting, version, says",
    [
        ("draft_lm_head_quantization fp8", "0.32.0", "vLLM 0.32.0 takes .* versions: 0.33.0"),
        ("draft_lm_head_quantization fp4", "0.33.0", "got fp4. Leave it out, and use -k"),
        ("draft_lm_head_quantization", "0.33.0", "got nothing"),
        ("num_speculative_tokens 2", "0.33.0", "Leave it out, and use -k"),
        ("draft-lm-head-quantization nvfp4", "0.33.1", ""),
        ("rejection_sample_method block", "0.31.0", ""),
    ],
)
def test_a_setting_of_drafting_must_be_one_that_the_version_takes(setting, version, says):
    words = f"-x {KEY}{setting}".split()
    if not says:
        refuse_settings(words, version)
        refuse_words("eval", words)
        return
    with pytest.raises(RecipeError, match=says):
        refuse_settings(words, version)


@pytest.mark.parametrize(
    "words",
    [
        ["--speculative-config.rejection_sample_method=fly"],
        ["--speculative-config.rejection_sample_method", "fly"],
        ["-sc", '{"method": "mtp", "rejection_sample_method": "fly"}'],
    ],
)
def test_a_lossy_way_of_drafting_is_not_measured(words):
    with pytest.raises(RecipeError, match=r"eval: must measure .* got fly, .* Leave rejection_"):
        refuse_words("eval", words)


def tiny(model: str, folder: Path) -> Source:
    return open_source(releases.write_checkpoint(folder, *releases.source_layout(model)))


@pytest.mark.parametrize(
    "model, works",
    [("glm-4.7", True), ("kimi-k3-mtp", False), ("gemma-4-26b-assistant", False)],
)
def test_stages_of_a_pipeline_with_a_draft(model, works, tmp_path):
    source = tiny(model, tmp_path / "m")
    for words in ("-pp 2", "--pipeline-parallel-size=2"):
        refuse_pipeline(source, 0, words.split())
        if works:
            refuse_pipeline(source, 1, words.split())
            continue
        with pytest.raises(RecipeError, match=r"vLLM must .* last stage; got 2"):
            refuse_pipeline(source, 1, words.split())
    refuse_pipeline(source, 1, ["-pp", "1", "-tp", "8"])


def test_an_embedding_in_the_block_is_there_on_the_last_stage(tmp_path):
    """keepmtp adds a copy to DeepSeek-V4's block; the release has none."""
    config, tensors = releases.source_layout("dsv4-flash")
    source = open_source(releases.write_checkpoint(tmp_path / "without", config, tensors))
    with pytest.raises(RecipeError, match="its embedding too"):
        refuse_pipeline(source, 1, ["-pp", "2"])
    tensors["mtp.0.emb.tok_emb.weight"] = tensors["embed.weight"]
    source = open_source(releases.write_checkpoint(tmp_path / "with", config, tensors))
    refuse_pipeline(source, 1, ["-pp", "2"])


def test_a_draft_of_its_own():
    """It is named in the speculative config."""
    words = serve_words("org/target", 2, *separate_draft("org/draft"))
    assert json.loads(words[-1])["model"] == "org/draft"
