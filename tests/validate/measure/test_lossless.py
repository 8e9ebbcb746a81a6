"""Faults of answers to the prompts of lossless: each one, what only looks like it, and what is never one."""

import pytest
from answering import answering
from keepmtp.validate.facts.lossless import FAULTS, InAnswer
from keepmtp.validate.facts.served import Output
from keepmtp.validate.measure import lossless
from keepmtp.validate.measure.lossless import PROMPTS, seen_in

GREEK = "η πόλη έχει μεγάλη ιστορία και πολλά μουσεία."
JSON = f'{GREEK}"}}\n'


def faults(text: str, prompt: str = "Greek 1", *, is_cut: bool = False) -> set[InAnswer]:
    return {*seen_in(PROMPTS[prompt], text, is_cut=is_cut)} & {*FAULTS}


def test_the_prompts():
    """Twelve scripts and 56 prompts, as terminal, page and docs say; each text as it is and as JSON,
    which is whole up to what the answer ends.
    """
    scripts = {name.split()[0] for name in PROMPTS} - {"code"}
    assert len(scripts) == 12 and len(PROMPTS) == 56 == len({*PROMPTS.values()})
    for name, prompt in PROMPTS.items():
        if name.endswith("JSON"):
            assert not faults('"}'[:1] + "}", name) - {"script"} and prompt.count("\n") == 1


def test_characters():
    assert faults(GREEK) == set()
    assert faults(f"η π\ufffd {GREEK}") == {"characters"}
    # The limit of tokens cuts a character into three bytes at most.
    assert faults(f"{GREEK}\ufffd\ufffd\ufffd", is_cut=True) == set()
    assert faults(f"{GREEK}\ufffd") == {"characters"}
    assert faults(f"{GREEK}\ufffd\ufffd\ufffd\ufffd", is_cut=True) == {"characters"}


@pytest.mark.parametrize(
    "text, is_cut, is_broken",
    [
        (JSON, False, False),
        (f'{GREEK}", "2": [1, 2]}} and more', False, False),
        (GREEK, True, False),
        (f'{GREEK}", "2": tr', True, False),
        (f"{GREEK}\\u03b", True, False),
        (f'{GREEK}",', True, False),
        (GREEK, False, True),
        (f"{GREEK}\n{GREEK}", True, True),
        (f'{GREEK}" and "2": 1}}\n{GREEK}', True, True),
        (f"{GREEK}\\x{GREEK}", True, True),
        (f'{GREEK}", "2": {"[" * 100_000}', True, True),
        (f'{GREEK}", "2": {"1" * 5_000}', True, True),
    ],
)
def test_json(text, is_cut, is_broken):
    assert ("JSON" in faults(text, "Greek 1 JSON", is_cut=is_cut)) == is_broken
    assert "JSON" not in faults(text, is_cut=is_cut), "only where it was asked for"


def test_repetition():
    assert faults(f"{GREEK} " * 3) == {"repetition"}
    assert faults("και " * 12) == {"repetition"}
    assert faults(f"{GREEK} {GREEK[::-1]} {GREEK}") == set(), "a third is there twice"


def test_script():
    assert faults(f"{GREEK} π = 3.14 (Wikipedia)") == set()
    assert faults("The city has a long history.") == {"script"}
    assert faults(f"{GREEK} 北京") == {"script"}
    assert faults("The city has a long history.", "Latin 1") == set()
    assert faults("東京", "Chinese 1") == set() and faults("ですから", "Chinese 1") == {"script"}
    assert faults("コード、漢字", "Japanese 1") == set()
    assert faults("人々は２ＤＫに住む", "Japanese 1") == set()
    assert faults("wait = 5  # µs, 1ª", "code 1") == set()
    assert faults("    return 1  # число", "code 1") == {"script"}


@pytest.mark.parametrize("text", ["", " \n", "\ufffd"])
def test_an_empty_answer_has_no_fault(text):
    assert {*seen_in(PROMPTS["Greek 1 JSON"], text, is_cut=True)} == {"empty", "cut"}


def test_what_was_held_back_is_joined(monkeypatch, tmp_path):
    """A server's own text lacks bytes that became no character; its joined one has special
    tokens.
    """
    with answering({}, tmp_path / "log") as (server, _):
        monkeypatch.setattr(type(server), "text_of", lambda _, tokens: "".join(map(chr, tokens)))
        whole = Output(token_ids=(*map(ord, "ab<eos>"),), text="ab")
        assert lossless.joined(server, whole) == "ab"
        broken = Output(token_ids=(ord("a"), 0xFFFD, 0xFFFD), text="a")
        assert lossless.joined(server, broken) == "a\ufffd\ufffd"
