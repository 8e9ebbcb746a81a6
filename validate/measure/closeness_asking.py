"""Asks a server for its predictions over a window of text: prompt log-probabilities, and tokens for
a text.

In: a healthy `Server`. Out: token ids, text, and `Predicted`.

Easy to get wrong: vLLM adds the token that follows in the text to the likeliest ones, so a position
has K or K + 1 entries. Drafting does not change them: vLLM 0.32.0 computes them from the target
alone (v1/worker/gpu_model_runner.py, `_get_prompt_logprobs_dict`), and gave the same to the last
bit with method=mtp and without. So the servers here run without it, which starts faster and leaves
more memory.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from ...recipes.errors import GateError
from .divergence import NO_TOKEN, Predicted
from .server import Server
from .texts import Text

WINDOW_SECONDS = 1800.0
"""How long one window may take: a server writes some ten thousand entries a second as JSON."""
_MOST_SUM = 1.001


def tokens_of(server: Server, text: Text) -> tuple[int, ...]:
    """A text as the server's own tokenizer and chat template make it; tokens stay as they are."""
    if isinstance(text, str):
        return tuple(server.post("/tokenize", {"prompt": text})["tokens"])
    if isinstance(text[0], int):
        return cast(tuple[int, ...], text)
    return tuple(
        server.post("/tokenize", {"messages": text, "add_generation_prompt": False})["tokens"]
    )


def text_of(server: Server, ids: Sequence[int]) -> str:
    """Tokens as text; what is no whole character is shown as the replacement character."""
    return server.text_of(ids).encode(errors="replace").decode()


def predictions(server: Server, ids: Sequence[int], *, top: int, vocabulary: int) -> Predicted:
    """What a server predicts after each token of a window but the last.

    Args:
        server: its --max-logprobs is at least `top`.
        ids: two tokens at least.
        top: how many of the likeliest tokens to name; the whole vocabulary where it has no more.
        vocabulary: its size.

    Raises:
        ServerFailed: the server died or refused the request.
        GateError: a reply that is no log-probabilities.
    """
    asked = {
        "prompt": list(ids),
        "prompt_logprobs": min(top, vocabulary),
        "max_tokens": 1,
        "temperature": 0.0,
        "seed": 0,
    }
    reply = server.post("/v1/completions", asked, timeout=WINDOW_SECONDS)
    rows: Sequence[Mapping[str, Mapping[str, Any]]] = reply["choices"][0]["prompt_logprobs"][1:]
    if len(rows) != len(ids) - 1 or not all(str(ids[at]) in row for at, row in enumerate(rows, 1)):
        raise GateError(
            "vllm serve",
            "must predict every token of a window",
            got=f"{len(rows)} rows",
            cure="See its log",
        )
    shape = len(rows), min(top + 1, vocabulary)
    names, logprobs = (
        np.full(shape, NO_TOKEN, dtype=np.int32),
        np.full(shape, -np.inf, dtype=np.float32),
    )
    following = np.empty(len(rows), dtype=np.float32)
    for at, row in enumerate(rows):
        names[at, : len(row)] = [int(name) for name in row]
        logprobs[at, : len(row)] = [entry["logprob"] for entry in row.values()]
        following[at] = row[str(ids[at + 1])]["logprob"]
    if np.exp(logprobs.astype(np.float64)).sum(axis=1).max() > _MOST_SUM:
        got, cure = "a row whose probabilities sum to more than 1", "Leave out --logprobs-mode"
        raise GateError("vllm serve", "must give log-probabilities", got=got, cure=cure)
    return Predicted(ids=names, logprobs=logprobs, following=following, is_whole=top >= vocabulary)
