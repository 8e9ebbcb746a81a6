"""What is said of requests that a server refuses."""

from answering import TOO_LONG, answering
from keepmtp.validate.measure.bench_client import Client


def test_a_refusal_is_said_in_the_servers_own_words(tmp_path):
    """Of the longest request, which is the one that does not fit."""
    short, long = ({"text": text} for text in ("1 + 1?", "1 + 1 = 2, and 2 + 2?"))
    answers = {short["text"]: "2", long["text"]: "4"}
    with answering(answers, tmp_path / "log", lambda _: "400") as (server, asked):
        client = Client(
            server=server, form="completions", process=server.process, log=tmp_path / "log"
        )
        assert TOO_LONG in client.why_refused([short, long], 8)
        assert [each["prompt"] for each in asked] == [long["text"]]
