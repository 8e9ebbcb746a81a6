"""The conversations of `keepmtp eval --only lossless` as text, with the tokenizer and the batches.

In: keepmtp's own conversations, expected calls included. Out: batches in which only what an assistant
says has weight.

Easy to get wrong: this model learns by heart what it is asked. It shows that a server, its parser and
the judge of the answers work, and says nothing about another model's tool calls.
"""

import json
import random
from collections.abc import Iterator
from typing import Any

from keepmtp.validate.measure.tool_calls import conversations
from texts import EOS_ID, Batch, padded, trained
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 640
BATCH_SIZE = 16
# What is not an assistant's is given, so it is hardly learned.
GIVEN_WEIGHT = 0.02
ROLES = ("<|user|>", "<|tool|>", "<|assistant|>")
# Hermes' form, without the tools' schemas: those are the same each time.
TEMPLATE = (
    "{% for one in messages %}{% if one.role == 'assistant' %}<|assistant|>{{ one.content or '' }}"
    "{% for call in one.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}<eos>"
    "{% elif one.role != 'system' %}<|{{ one.role }}|>{{ one.content }}{% endif %}{% endfor %}"
    "{% if tools and add_generation_prompt %}<|assistant|>{% endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE over the conversations, whose roles are tokens of their own."""
    texts = [json.dumps(each, ensure_ascii=False) for each in whole_conversations()]
    tokenizer = trained(texts, vocab_size=VOCAB_SIZE - len(ROLES))
    tokenizer.add_special_tokens({"additional_special_tokens": [*ROLES]})
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def batches(tokenizer: PreTrainedTokenizerFast) -> Iterator[Batch]:
    """Endless stream of batches, in which each conversation comes equally often."""
    rng = random.Random(0)
    rows = [encoded(tokenizer, messages) for messages in whole_conversations()]
    while True:
        rng.shuffle(rows)
        for start in range(0, len(rows) - BATCH_SIZE + 1, BATCH_SIZE):
            yield padded(rows[start : start + BATCH_SIZE])


def whole_conversations() -> list[list[dict[str, Any]]]:
    """The messages of each, the last answer included."""
    found = []
    for turns in conversations():
        messages = json.loads(json.dumps([*turns[-1].messages, turns[-1].answer]))
        for message in messages:
            for call in message.get("tool_calls", ()):  # as vLLM gives them to a template
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        found.append(messages)
    return found


def encoded(
    tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]]
) -> tuple[list[int], list[float]]:
    """Token ids, and the weight of each: an assistant's words count, and the end of them."""
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    ids = tokenizer.encode(text)
    assistant = tokenizer.convert_tokens_to_ids(ROLES[-1])
    weights = []
    weight = GIVEN_WEIGHT
    for one in ids:
        weights.append(weight)
        if one == assistant:
            weight = 1.0
        elif one == EOS_ID:
            weight = GIVEN_WEIGHT
    return ids, weights
