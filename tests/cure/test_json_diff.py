"""A diff of JSON files that people read: each hunk with its reason."""

import json

import pytest
from keepmtp.cure.json_diff import in_form_of, json_diff

BEFORE = {"a": 1, "quantization_config": {"ignore": ["lm_head", "x"], "bits": 4}, "z": [1, 2]}


def test_a_hunk_has_its_reason_and_a_longer_list_one_new_line():
    after = json.loads(json.dumps(BEFORE))
    after["quantization_config"]["ignore"].append("re:^mtp")
    reasons = ["vLLM builds mtp plain", "vLLM builds mtp plain"]
    lines = json_diff(
        "config.json", json.dumps(BEFORE).encode(), json.dumps(after, indent=4).encode(), reasons
    )
    assert lines == [
        "--- a/config.json",
        "+++ b/config.json",
        "# vLLM builds mtp plain",
        "@@ -5,4 +5,5 @@",
        '       "lm_head"',
        '       "x"',
        '+      "re:^mtp"',
        "     ]",
        '     "bits": 4',
    ]


def test_the_same_values_are_no_diff_and_a_new_file_is_all_new():
    assert json_diff("a", json.dumps(BEFORE).encode(), json.dumps(BEFORE, indent=1).encode()) == []
    assert json_diff("a", None, b'{"k": []}')[:3] == ["--- /dev/null", "+++ b/a", "@@ -0,0 +1,3 @@"]
    assert json_diff("a", b'{"k": []}', None)[:2] == ["--- a/a", "+++ /dev/null"]


@pytest.mark.parametrize("count", [5_000, 20_000])
def test_a_long_index_shows_the_ends_of_what_is_new(count):
    old = {f"layer.{n:05}": "a" for n in range(count)}
    new = old | {f"mtp.{n:03}\u202e": "b" for n in range(800)}
    lines = json_diff("index", json.dumps(old).encode(), json.dumps(new).encode())
    assert len(lines) < 25 and any("786 more lines" in line for line in lines)
    assert all(line.isprintable() for line in lines)


def test_a_file_keeps_its_indent_its_escapes_and_its_end():
    for text in ('{\n    "é": 1\n}\n', '{\n  "\\u00e9": 1\n}', '{"a": 1}'):
        value = json.loads(text)
        written = in_form_of(text.encode(), value).decode()
        assert json.loads(written) == value and (text.count("\n") == 0 or written == text)
