"""Runs in vLLM's Python: `vllm bench serve`, once for each line of standard input, through a server's socket.

In: the socket's path as the only word; then lines of JSON, {"words": [...], "requests": [{"messages": [...]} or
{"text": ...}, ...], "output_tokens": ...}. Out: for each a line of JSON on standard output, what vLLM's benchmark found
and the errors of requests that failed. Everything that vLLM prints goes to standard error.

Easy to get wrong: the benchmark is vLLM's own (vllm/benchmarks/serve.py of 0.32); three of its names are replaced. It
connects through a port, and our servers listen on a socket. It takes requests from a dataset of its own, and ours are a
list. And it loads a tokenizer to count tokens where a server does not: ours always does, so none is loaded.
"""

import json
import os
import sys
from importlib import import_module
from typing import Any

KEPT = (
    "duration",
    "completed",
    "failed",
    "total_input_tokens",
    "total_output_tokens",
    *(f"{of}_{name}_ms" for name in ("ttft", "tpot", "itl") for of in ("median", "p99")),
    "spec_decode_num_drafts",
    "spec_decode_draft_tokens",
    "spec_decode_accepted_tokens",
)
_CONNECTION = ("limit", "limit_per_host", "keepalive_timeout", "force_close")


def run(asked: dict[str, Any], socket: str) -> dict[str, Any]:
    """One benchmark."""
    aiohttp, serve = import_module("aiohttp"), import_module("vllm.benchmarks.serve")
    sample = import_module("vllm.benchmarks.datasets").SampleRequest

    def connector(**settings: Any) -> Any:
        return aiohttp.UnixConnector(socket, **{name: settings[name] for name in _CONNECTION if name in settings})

    def samples(*_: Any) -> list[Any]:
        return [
            sample(
                prompt=each.get("text", ""),
                prompt_len=1,  # the server's own count replaces it
                expected_output_len=asked["output_tokens"],
                chat_messages=each.get("messages"),
                request_id=f"bench-{number}",
            )
            for number, each in enumerate(asked["requests"])
        ]

    aiohttp.TCPConnector = connector
    serve.get_samples = samples
    serve.get_tokenizer = lambda *_, **__: object()
    parser = import_module("vllm.utils.argparse_utils").FlexibleArgumentParser()
    serve.add_cli_args(parser)
    found = serve.main(parser.parse_args(asked["words"]))
    errors = [error for error in found.get("errors", ()) if error]
    return {name: found[name] for name in KEPT if name in found} | {"errors": errors[:1]}


def main() -> None:
    """Until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        answers.write(json.dumps(run(json.loads(line), sys.argv[1])) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
