"""What was measured is kept a line each, and only what was asked the same way meets in one file."""

import pytest
from benches import repetition
from keepmtp.recipes.errors import CheckpointError
from keepmtp.validate.measure.bench_lines import BenchHeader, Measured, open_lines, read_lines

HEADER = BenchHeader(
    role="checkpoint",
    checkpoint_sha256="0" * 64,
    vllm="0.32.0",
    device="CPU",
    words=(),
    form="chat",
    prompts_sha256="1" * 64,
    requests=0,
    output_tokens=256,
    seed=0,
    max_num_seqs=8,
    max_model_len=2048,
)


def measured(k: int, number: int = 0) -> Measured:
    kept = repetition(k, 100.0 + k, number=number)
    return Measured(k=k, concurrency=1, context=0, as_served="native", reason="", repetition=kept)


def test_lines_read_back_are_the_same(tmp_path):
    lines, aside = open_lines(tmp_path / "deep" / "bench.jsonl", HEADER)
    for line in (measured(0), measured(1), measured(1, number=1)):
        lines.add(line)
    again = read_lines(lines.path)
    assert aside is None and again.header == HEADER and again.lines == lines.lines
    assert list(again.lines) == [(0, 1, 0, 0), (1, 1, 0, 0), (1, 1, 0, 1)]


def test_a_part_of_a_line_is_cut_off(tmp_path):
    lines, _ = open_lines(tmp_path / "bench.jsonl", HEADER)
    lines.add(measured(0))
    whole = lines.path.read_bytes()
    last = whole.splitlines()[-1]
    for end in range(1, len(last), 97):
        lines.path.write_bytes(whole + last[:end])
        found, _ = open_lines(lines.path, HEADER)
        assert found.lines == lines.lines and lines.path.read_bytes() == whole


@pytest.mark.parametrize(
    "change", [{"checkpoint_sha256": "2" * 64}, {"vllm": "0.33.0"}, {"words": ("-tp", "2")}, {"device": "H200"}]
)
def test_what_was_asked_otherwise_is_kept_aside_and_taken_back(change, tmp_path):
    path = tmp_path / "bench.jsonl"
    lines, _ = open_lines(path, HEADER)
    lines.add(measured(0))
    other = HEADER.model_copy(update=change)
    fresh, aside = open_lines(path, other)
    assert aside == tmp_path / f"bench.{HEADER.digits}.jsonl" and not fresh.lines
    fresh.add(measured(1))
    back, aside = open_lines(path, HEADER)
    assert back.lines == lines.lines and aside == tmp_path / f"bench.{other.digits}.jsonl"


def test_a_file_that_is_none_is_named_by_its_line(tmp_path):
    lines, _ = open_lines(tmp_path / "bench.jsonl", HEADER)
    lines.add(measured(0))
    whole = lines.path.read_text()
    for text, says in (
        (whole + "{}\n", r"bench\.jsonl:3: must be a repetition; got k"),
        (
            whole + whole.splitlines(keepends=True)[1],
            r"bench\.jsonl:3: must measure each repetition once; got k=0, 1 at",
        ),
        ("{}\n", r"bench\.jsonl:1: must be a header of repetitions"),
    ):
        lines.path.write_text(text)
        with pytest.raises(CheckpointError, match=says):
            open_lines(lines.path, HEADER)
