"""What `cells.py` puts into a dry load, in the place of keepmtp's cures: one checkpoint in many broken
states, each with several broken tensors.

In: as a job's `cures`, a JSON file: a list of states, each a mapping of tensors to dtype and shape,
or to null where one is missing. Out: beside it an account of each state, N.json; its `cures` are the
tensors at which vLLM's loader of a parameter raised. The load goes on after them.

Easy to get wrong: what raises outside of a parameter's loader ends the load, as ever. The model is
built once, since no tensor changes it, and the process forks for each state before it loads.
"""

import functools
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

OUTCOMES: dict[str, str] = {}


def mend(chosen: str, _version: str) -> None:
    """Load all states in processes of their own, then the checkpoint as it is."""
    from dryload import stages, world
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    states = json.loads(Path(chosen).read_text())
    broken = dict[str, Any]()
    number = list[int]()
    read = world.meta_tensors
    construct, load, account = (
        getattr(stages.StagedLoad, name) for name in ("_construct", "_load", "account")
    )

    def meta_tensors(files: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in read(files):
            if name not in broken:
                yield name, tensor
            elif broken[name] is not None:
                dtype, shape = broken[name]
                yield name, torch.empty(shape, dtype=world.DTYPES[dtype], device="meta")

    def constructed(staged: Any, model_config: Any) -> Any:
        made = construct(staged, model_config)
        for param in staged._now.model.parameters():
            own = getattr(param, "weight_loader", default_weight_loader)
            param.weight_loader = functools.partial(_caught, own, staged, broken)
        return made

    def loaded(staged: Any, *args: Any) -> None:
        if not staged._parts["draft"].model:
            for index, state in enumerate(states):
                if os.fork() == 0:
                    broken.update(state)
                    number.append(index)
                    break
                os.wait()
        load(staged, *args)

    def accounted(staged: Any) -> Any:
        made = account(staged)
        if number:
            made["load"]["cures"] = [*OUTCOMES]
            text = json.dumps(made, default=str)
            Path(chosen).with_name(f"{number[0]}.json").write_text(text)
            os._exit(0)
        return made

    world.meta_tensors = meta_tensors
    stages.StagedLoad._construct = constructed
    stages.StagedLoad._load = loaded
    stages.StagedLoad.account = accounted
    # It raises over all that is missing at once. The account has each.
    DefaultModelLoader.track_weights_loading = lambda *_args, **_kwargs: None


def _caught(own: Callable[..., Any], staged: Any, broken: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return own(*args, **kwargs)
    except Exception:
        name = staged._now.account.current
        if name not in broken:
            raise
        OUTCOMES[name] = ""
        return True
