"""Arithmetic word problems that two small models can really solve, their tokenizer, and their
batches.

In: a seed and a split name. Out: `Problem`s in the form GSM8K uses, so that its strict-match rule
reads the answer:

    Question: Tom has 5 apples. Tom buys 7 more apples. How many apples does Tom have now?
    Answer: Tom starts with 5 apples and buys 7 more, so 5 + 7 = 12.
    #### 12

The easy thing to get wrong is the held-out split. Here the text of the question alone decides it:
the CRC-32 of the question modulo 10 is 0 for held-out and anything else for train, so no text can
be in both, whatever the seeds. A number fact ("6 * 7") does occur in both, with other names and
things; only the whole question is new.

    python models/train/problems.py --out models/problems.jsonl --held-out models/held_out.jsonl
"""

import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from texts import EOS_ID, Batch, padded, trained, write_files
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 512
BATCH_SIZE = 32
NUM_TEXTS = 4000  # that the tokenizer is trained on
HELD_OUT_ONE_IN = 10
QUESTION_WEIGHT = (
    0.1  # the question is mostly noise to predict; a little weight keeps its embeddings useful
)
CALIBRATION_SEED = 1042  # training draws with 0
NUM_CALIBRATION_ROWS = 600
HELD_OUT_SEED = 1000
NUM_HELD_OUT_ROWS = 400

Told = tuple[str, str, int]  # a question, its solution, and the number
# fmt: off
_NAMES = (
    "Tom", "Ann", "Bob", "Sue", "Max", "Eva", "Leo", "Mia",
    "Sam", "Zoe", "Ben", "Ida", "Kim", "Ned", "Amy", "Joe",
)
_THINGS = (
    "apples", "books", "coins", "pens", "cards", "shells", "stamps", "eggs",
    "cups", "keys", "nuts", "toys", "seeds", "maps", "rings", "balls",
)
# fmt: on


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One word problem; `prompt + completion` is the whole text, without the closing `<eos>`."""

    question: str
    solution: str
    answer: int

    @property
    def prompt(self) -> str:
        """What the model is given."""
        return f"Question: {self.question}\nAnswer:"

    @property
    def completion(self) -> str:
        """What the model should write."""
        return f" {self.solution}\n#### {self.answer}"

    @property
    def is_held_out(self) -> bool:
        """Whether the question belongs to the held-out split; training never sees it."""
        return zlib.crc32(self.question.encode()) % HELD_OUT_ONE_IN == 0


def problems(*, held_out: bool, seed: int = 0) -> Iterator[Problem]:
    """Endless stream of problems of one split, the same for the same seed."""
    rng = random.Random(seed)
    while True:
        kind = rng.choice(_KINDS)
        name, thing = rng.choice(_NAMES), rng.choice(_THINGS)
        question, solution, answer = kind(rng, name, thing)
        problem = Problem(question=question, solution=solution, answer=answer)
        if problem.is_held_out == held_out:
            yield problem


def distinct_problems(count: int, *, held_out: bool, seed: int) -> list[Problem]:
    """First `count` problems of the stream, each question once."""
    stream = problems(held_out=held_out, seed=seed)
    found: dict[str, Problem] = {}
    while len(found) < count:
        problem = next(stream)
        found.setdefault(problem.question, problem)
    return list(found.values())


def rows(*, held_out: bool) -> list[dict[str, str]]:
    """What the tiny recipes calibrate on, `prompt` and `completion` of the training side; or
    `question` and `answer` as GSM8K has them, of the held-out side, which stays unseen.
    """
    if not held_out:
        items = distinct_problems(NUM_CALIBRATION_ROWS, held_out=False, seed=CALIBRATION_SEED)
        return [{"prompt": item.prompt, "completion": item.completion} for item in items]
    found = []
    for item in distinct_problems(NUM_HELD_OUT_ROWS, held_out=True, seed=HELD_OUT_SEED):
        answer = f"{item.solution}\n#### {item.answer}"
        found.append({"question": item.question, "answer": answer})
    return found


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE trained on train-split texts; every digit is its own token, so numbers have no
    odd merges.

    The BPE may end with fewer than `VOCAB_SIZE` entries, because the texts use few words; the
    models keep `VOCAB_SIZE` rows so that the width of `lm_head` stays a multiple of 128.
    """
    stream = islice(problems(held_out=False), NUM_TEXTS)
    texts = [problem.prompt + problem.completion for problem in stream]
    return trained(texts, vocab_size=VOCAB_SIZE)


def batches(tokenizer: PreTrainedTokenizerFast) -> Iterator[Batch]:
    """Endless stream of batches of the training side."""
    stream = problems(held_out=False)
    while True:
        yield padded([_encoded(tokenizer, problem) for problem in islice(stream, BATCH_SIZE)])


def _encoded(tokenizer: PreTrainedTokenizerFast, problem: Problem) -> tuple[list[int], list[float]]:
    """Token ids, closed with `<eos>`, and the weight of each."""
    question = tokenizer.encode(problem.prompt)
    completion = [*tokenizer.encode(problem.completion), EOS_ID]
    weights = [QUESTION_WEIGHT] * len(question) + [1.0] * len(completion)
    return question + completion, weights


def _buy(rng: random.Random, name: str, thing: str) -> Told:
    a, b = rng.randint(2, 40), rng.randint(1, 20)
    return (
        f"{name} has {a} {thing}. {name} buys {b} more {thing}. How many {thing} does {name} "
        "have now?",
        f"{name} starts with {a} {thing} and buys {b} more, so {a} + {b} = {a + b}.",
        a + b,
    )


def _give(rng: random.Random, name: str, thing: str) -> Told:
    a = rng.randint(2, 40)
    b = rng.randint(1, min(a, 20))
    return (
        f"{name} has {a} {thing}. {name} gives away {b} {thing}. How many {thing} are left?",
        f"{name} starts with {a} {thing} and gives away {b}, so {a} - {b} = {a - b}.",
        a - b,
    )


def _boxes(rng: random.Random, name: str, thing: str) -> Told:
    a, b = rng.randint(2, 9), rng.randint(2, 9)
    return (
        f"{name} has {a} boxes with {b} {thing} in each box. How many {thing} are there in all?",
        f"There are {a} boxes with {b} {thing} each, so {a} * {b} = {a * b}.",
        a * b,
    )


def _share(rng: random.Random, name: str, thing: str) -> Told:
    a, b = rng.randint(2, 9), rng.randint(2, 9)
    return (
        f"{name} shares {a * b} {thing} among {a} friends. How many {thing} does each friend get?",
        f"The {a * b} {thing} go to {a} friends, so {a * b} / {a} = {b}.",
        b,
    )


def _buy_then_give(rng: random.Random, name: str, thing: str) -> Told:
    a, b = rng.randint(2, 40), rng.randint(1, 20)
    c = rng.randint(1, min(a + b, 20))
    return (
        f"{name} has {a} {thing}. {name} buys {b} more and then gives away {c}. How many "
        f"{thing} are left?",
        f"{name} starts with {a} {thing} and buys {b} more, so {a} + {b} = {a + b}. "
        f"Then {name} gives away {c}, so {a + b} - {c} = {a + b - c}.",
        a + b - c,
    )


def _boxes_and_more(rng: random.Random, name: str, thing: str) -> Told:
    a, b, c = rng.randint(2, 9), rng.randint(2, 9), rng.randint(2, 9)
    return (
        f"{name} has {a} boxes with {b} {thing} in each box and {c} more {thing}. "
        f"How many {thing} are there in all?",
        f"There are {a} boxes with {b} {thing} each, so {a} * {b} = {a * b}. "
        f"With {c} more, {a * b} + {c} = {a * b + c}.",
        a * b + c,
    )


_KINDS = (_buy, _give, _boxes, _share, _buy_then_give, _boxes_and_more)


if __name__ == "__main__":
    write_files(rows)
