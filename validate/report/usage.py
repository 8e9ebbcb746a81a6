"""What a card says to a person who serves the checkpoint: context, sampling, parsers, and how many
GPUs.

In: the checkpoint's small files and headers. Out: a `Usage`.

Easy to get wrong: nobody measured any of it here. What no file says is left out, and GPUs are
counted from bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ...checkpoints.source import Source, small_file, small_object
from ...quantize.needs.cards import CARDS
from ..measure.room import least_gpus

# Source: vLLM 0.32.0 config/model.py (get_diff_sampling_param).
_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
_TEMPLATES = ("chat_template.jinja", "chat_template.json")
_CARDS = ("4090", "L40S", "H100", "H200", "B200")
_MOST_GPUS = 8

# Left out are types whose models need different ones (deepseek_v3, qwen3_next), and those that vLLM
# does not name.
# Source: vLLM 0.32.0 reasoning/__init__.py, tool_parsers/__init__.py, and the formats that
# parser/*.py describe.
PARSERS: Mapping[str, tuple[str, str]] = {
    "deepseek_v4": ("deepseek_v4", "deepseek_v4"),
    "glm4_moe": ("glm45", "glm47"),
    "glm4_moe_lite": ("glm45", "glm47"),
    "hy_v3": ("hy_v3", "hy_v3"),
    "hy_v4": ("hy_v4", "hy_v4"),
    "inkling_mm_model": ("inkling", "inkling"),
    "kimi_k3": ("kimi_k3", "kimi_k3"),
    "longcat_flash": ("", "longcat"),
    "minimax_m3_vl": ("minimax_m3", "minimax_m3"),
    "nemotron_h": ("nemotron_v3", "qwen3_coder"),
    "qwen3_5": ("qwen3", "qwen3_coder"),
    "qwen3_5_moe": ("qwen3", "qwen3_coder"),
    "step3p5": ("step3p5", "step3p5"),
}
"""Family -> vLLM's parsers of reasoning and of tool calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """For the person who serves a checkpoint.

    Attributes:
        context: tokens, by config.json; 0 where it does not say.
        sampling: values of generation_config.json that vLLM takes by itself.
        is_chat: there is a chat template.
        parsers: words for `vllm serve`; () where none are known, or no chat template is there.
        gpus: (number, card, its memory in GB): on how few the weights fit, with room for a KV
            cache.
    """

    context: int
    sampling: Mapping[str, float]
    is_chat: bool
    parsers: tuple[str, ...]
    gpus: tuple[tuple[int, str, int], ...]


def usage_of(checkpoint: Source, family: str) -> Usage:
    """Read a checkpoint's `Usage`.

    Raises:
        CheckpointError: generation_config.json or tokenizer_config.json cannot be read.
    """
    config = checkpoint.config.get("text_config") or checkpoint.config
    context = config.get("max_position_embeddings")
    values = small_object(checkpoint, "generation_config.json") or {}
    tokenizer = small_object(checkpoint, "tokenizer_config.json") or {}
    is_chat = bool(tokenizer.get("chat_template")) or any(
        small_file(checkpoint, name) for name in _TEMPLATES
    )
    reasoning, tools = PARSERS.get(family, ("", "")) if is_chat else ("", "")
    words = ("--reasoning-parser", reasoning) if reasoning else ()
    words += ("--enable-auto-tool-choice", "--tool-call-parser", tools) if tools else ()
    gpus = []
    for name in _CARDS:
        number = least_gpus(checkpoint, CARDS[name] * 10**9)
        if number and number <= _MOST_GPUS:
            gpus.append((number, name, CARDS[name]))
            if number == 1:
                break  # a larger one holds it as well
    return Usage(
        context=context if type(context) is int and context > 0 else 0,
        sampling={key: values[key] for key in _SAMPLING if type(values.get(key)) in (int, float)},
        is_chat=is_chat,
        parsers=words,
        gpus=tuple(gpus),
    )
