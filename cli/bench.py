"""`keepmtp bench`: how fast vLLM serves a checkpoint, for each number of drafted tokens and each
load.

In: a checkpoint, perhaps what it was made from, and a matrix. Out: tables, bench.json with all
repetitions, and the report made anew.
"""

import re
from functools import partial
from typing import Annotated

import typer

from ..recipes.errors import RecipeError
from .options import (
    DryRunOption,
    MaxTokensOption,
    OriginalOption,
    PromptsOption,
    ServeOptions,
)
from .tables import answer

_MOST_K = 4
_LONGEST_RANGE = 64
_NUMBERS = re.compile(r"(\d{1,6})(?:\.\.(\d{1,6}))?")


def bench(
    served: ServeOptions,
    source: OriginalOption = None,
    k: Annotated[
        str | None, typer.Option("-k", "--k", help="Tokens drafted a step: 0..4, or 0,1,3.")
    ] = None,
    concurrency: Annotated[str, typer.Option(help="Requests in flight.")] = "1,8,32",
    prompts: PromptsOption = None,
    requests: Annotated[int, typer.Option(min=0, help="Requests a repetition.")] = 0,
    output_tokens: MaxTokensOption = 256,
    repeat: Annotated[int, typer.Option(min=1, help="Repetitions with each server.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the order of prompts.")] = 0,
    dry_run: DryRunOption = False,
) -> None:
    """Measure how fast vLLM serves a checkpoint with and without MTP, for each k and load;
    recommend a k.

    vLLM's own `vllm bench serve` asks a server that is started for each k; k=0 serves without MTP.
    All k get the same requests, greedily, through the chat template where there is one, and answers
    end by themselves. A larger k is recommended only if its slowest repetition is faster than the
    fastest of the smaller one. Each repetition is kept as it comes: the same command measures only
    what is missing.

    Without -k, k is 0 to 4, as far as the checkpoint can draft. Without --requests, there are four
    for each in flight, and at least 16. Without --prompts, 400 word problems are asked; a file of
    your own has `prompt`, `messages` or `turns` (SPEED-Bench) on each line. With --source, the same
    matrix is measured for it too.

    Exit status 1 if a server or a request fails.

    \b
    Example: `keepmtp bench /data/out -k 0..4 --concurrency 1,8,32 --prompts own.jsonl -- -tp 8`
    """
    from ..checkpoints.source import view_of
    from ..validate.measure.bench import Bench
    from ..validate.measure.harness import ks_up_to, refuse_drafts
    from ..validate.measure.texts import read_prompts
    from .measured import benched
    from .session import Session

    session = Session("bench", served, source or "none", is_dry=dry_run)
    opened = session.opened
    # Without an MTP block there is nothing to draft: k=0 alone.
    ks = (0,)
    if k is not None:
        ks = numbers("--k", k, least=0)
    elif num := view_of(opened).usual_k:
        ks = ks_up_to(max(_MOST_K, num), view_of(opened).draft_unit)
    make = partial(
        Bench,
        ks=ks,
        concurrency=numbers("--concurrency", concurrency, least=1),
        prompts=read_prompts(prompts),
        requests=requests,
        output_tokens=output_tokens,
        repeat=repeat,
        seed=seed,
    )
    # Before a server is started, which may take half an hour: a k that vLLM cannot draft, a prompt
    # that does not fit.
    refuse_drafts(opened, *ks, option="--k")
    if session.original is not None:
        refuse_drafts(session.original, *ks, option="--k", is_original=True)
    facts, _ = session.measure({"bench": make})
    answer(facts, [*benched(facts["bench"]), session.places], as_json=served.as_json)


def numbers(option: str, words: str, *, least: int) -> tuple[int, ...]:
    """Numbers of a list such as `1,8,32` or `0..4`, ascending, each once.

    Raises:
        RecipeError: no such list, or a number below `least`.
    """
    chosen = set[int]()
    for part in words.split(","):
        numbers = range(0)
        if named := _NUMBERS.fullmatch(part.strip()):
            numbers = range(int(named[1]), int(named[2] or named[1]) + 1)
        if not numbers or numbers[0] < least or len(numbers) > _LONGEST_RANGE:
            raise RecipeError(
                option,
                f"must be {least} or more, and a range that goes up, by {_LONGEST_RANGE} at most",
                got=part,
                cure=f"Write {option} 1,8,32 or {option} {least}..4",
            )
        chosen.update(numbers)
    return tuple(sorted(chosen))
