"""What was measured is kept a line each. What a kill leaves, and what is set aside:
evaluation/test_answers.py.
"""

import pytest
from benches import repetition
from keepmtp.recipes.errors import CheckpointError
from keepmtp.validate.measure.bench_lines import BenchHeader, Measured
from keepmtp.validate.measure.line_file import open_lines

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


def test_a_file_that_is_none_is_named_by_its_line(tmp_path):
    lines = open_lines(tmp_path / "bench.jsonl", HEADER)
    lines.add(measured(0))
    whole = lines.path.read_text()
    for text, says in (
        (whole + "{}\n", r"bench\.jsonl:3: must be a line that keepmtp wrote \(Measured\); got k"),
        (
            whole + whole.splitlines(keepends=True)[1],
            r"bench\.jsonl:3: .*and is there once; got MatrixPlace\(k=0, concurrency=1",
        ),
        ("{}\n", r"bench\.jsonl:1: must be a line that keepmtp wrote \(BenchHeader\)"),
    ):
        lines.path.write_text(text)
        with pytest.raises(CheckpointError, match=says):
            open_lines(lines.path, HEADER)
