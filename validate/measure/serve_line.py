"""The words that serve a checkpoint, for a shell and for Docker: the card prints them, and `keepmtp
serve` runs them.

In: what is served, and the number of tokens to draft in a step. Out: words of a command.

Easy to get wrong: vLLM's image begins with `vllm serve` itself (ENTRYPOINT), so these two words are
not repeated there. And a container sees no folder of this machine that is not named with -v.
"""

import json
from pathlib import Path

_IMAGE = "vllm/vllm-openai"
_IN_IMAGE = "/model"
_DOCKER = ("docker", "run", "--gpus", "all")
_SHARED = ("-p", "8000:8000", "--ipc=host")  # the processes of one server share memory
_DOWNLOADS = (
    "-v",
    "huggingface:/hub",
    "-e",
    "HF_HOME=/hub",
)  # a volume: the next container has them already


def draft_words(k: int) -> tuple[str, ...]:
    """The option that drafts `k` tokens a step; nothing for 0."""
    if not k:
        return ()
    return "--speculative-config", json.dumps(
        {"method": "mtp", "num_speculative_tokens": k}, separators=(",", ":")
    )


def serve_words(model: str, k: int, *further: str) -> tuple[str, ...]:
    """`vllm serve` of a folder or Hub id, with `k` tokens drafted a step, and further words at the
    end.
    """
    return "vllm", "serve", model, *draft_words(k), *further


def docker_words(model: str, k: int, *further: str, version: str) -> tuple[str, ...]:
    """The same in a container of vLLM's own image, on port 8000.

    Args:
        model: a folder, by its absolute path, or a Hub id, which the container downloads.
        k: tokens drafted a step.
        further: words at the end.
        version: of vLLM, which names the image.
    """
    image = f"{_IMAGE}:v{version.partition('+')[0]}"
    if not Path(model).is_absolute():
        return *_DOCKER, *_DOWNLOADS, *_SHARED, image, model, *draft_words(k), *further
    name = ("--served-model-name", Path(model).name)
    return (
        *_DOCKER,
        "-v",
        f"{model}:{_IN_IMAGE}:ro",
        *_SHARED,
        image,
        _IN_IMAGE,
        *name,
        *draft_words(k),
        *further,
    )
