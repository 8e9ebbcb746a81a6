"""What servers did, from numbers alone; and what is read from vLLM's metrics and logs."""

import json
import shlex
import zlib

import pytest
from keepmtp.recipes.errors import RecipeError
from keepmtp.validate.facts.served import Drafts, Output, Run, partings, total
from keepmtp.validate.measure.harness import ks_up_to
from keepmtp.validate.measure.replies import read_counters
from keepmtp.validate.measure.serve_line import draft_words, refuse_settings
from keepmtp.validate.measure.server import last_error, refuse_words
from keepmtp.validate.measure.texts import PROMPTS

METRICS = """\
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 10.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.795252730227056e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 20.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 17.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 7.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 10.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 1.0
"""
WORKER = "(Worker pid=7) ERROR 11-21 09:17:21 [multiproc_executor.py:953] "
ENGINE = "(EngineCore pid=6) ERROR 11-21 09:17:22 [core.py:1510] "


def test_partings():
    top = ({1: -0.1}, {2: -0.7, 5: -0.8, 9: -3.0}, {3: -0.1})
    plain = [Output(token_ids=(1, 2, 3), text="", top_logprobs=top)] * 5
    others = [(1, 2, 3), (1, 5, 3), (1, 9), (1, 7, 3), (1, 2)]
    found = partings(plain, [Output(token_ids=ids, text="") for ids in others])
    assert [(p.prompt, p.at, p.plain_token, p.token) for p in found] == [
        (1, 1, 2, 5),
        (2, 1, 2, 9),
        (3, 1, 2, 7),
        (4, 2, 3, None),
    ]
    assert [p.gap and round(p.gap, 6) for p in found] == [0.1, 2.3, None, None]
    assert [p.is_near_tie for p in found] == [True, False, False, False]


def test_counters():
    found = read_counters(METRICS.encode())
    assert found == Drafts(
        drafts=11, draft_tokens=20, accepted_tokens=17, accepted_per_position=(10, 7)
    )
    assert found.acceptance == 0.85 and found.mean_accepted_length == 1 + 17 / 11
    assert found.since(Drafts()) == found and found.since(found).acceptance is None
    assert read_counters(b"") == Drafts()
    assert total([found, Drafts(drafts=1, accepted_per_position=(1,))]).accepted_per_position == (
        11,
        7,
    )
    assert total([]) == Drafts()


def test_a_file_gives_the_counts_and_no_figure():
    """What is computed is computed again: a figure that the counts do not give is not read."""
    run = Run(
        k=2,
        loaded=True,
        drafts=10,
        draft_tokens=20,
        accepted_tokens=17,
        accepted_per_position=(10, 7),
    )
    written = run.model_dump(mode="json")
    assert written["acceptance"] == 0.85 and written["acceptance_per_position"] == [1.0, 0.7]
    assert Run.model_validate(written | {"acceptance": 0.99}) == Run.model_validate(written) == run
    output = Output(token_ids=(1,), text="a", top_logprobs=({1: -0.1},))
    assert output.model_dump() == {"token_ids": (1,), "text": "a"}


def test_the_innermost_error_is_quoted(tmp_path):
    """Three processes raise one after the other; the first one knows why."""
    log = tmp_path / "log"
    log.write_text(
        f"{WORKER}Traceback (most recent call last):\n{WORKER}    raise ValueError(\n"
        f"{WORKER}ValueError: Failed to find a kernel. Reasons: \n{WORKER}CpuKernel requires AMX\n"
        f"{ENGINE}Exception: WorkerProc initialization failed due to an exception in a "
        "background process.\n"
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core "
        "proc(s): {}\n"
    )
    assert (
        last_error(log, 1) == "ValueError: Failed to find a kernel. Reasons: CpuKernel requires AMX"
    )


def test_what_the_front_end_says_next_is_no_part_of_an_error(tmp_path):
    log = tmp_path / "log"
    dead = "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue."
    log.write_text(
        f'{WORKER}{dead}\n(APIServer pid=1) INFO:     127.0.0.1:1 - "POST /v1/completions '
        'HTTP/1.1" 500\n'
    )
    assert last_error(log, None) == dead


@pytest.mark.parametrize(
    "text, status, says",
    [
        ("usage: vllm serve\nvllm: error: unrecognized arguments: --nope\n", 2, "--nope"),
        ("(APIServer pid=1) INFO 11-21 09:17:21 [api.py:1] Starting\n", -9, "memory"),
        ("", 3, "exit status 3: an empty log"),
    ],
)
def test_a_server_that_dies_without_a_traceback(tmp_path, text, status, says):
    (tmp_path / "log").write_text(text)
    assert says in last_error(tmp_path / "log", status)


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
        refuse_words("serve-check", ["--tensor-parallel-size", "8", word, "1"])
    refuse_words("serve-check", ["--tensor-parallel-size", "8"])


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
        ("rejection_sample_method block", "0.29.0", ""),
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


def test_the_default_prompts_are_held_out():
    """By the rule of models/train/problems.py: CRC-32 of the question modulo 10 is 0."""
    assert len(PROMPTS) == 8
    for prompt in PROMPTS:
        question = prompt.removeprefix("Question: ").removesuffix("\nAnswer:")
        assert zlib.crc32(question.encode()) % 10 == 0, question
