"""Train one of the tiny checkpoints from nothing, write it as its big relatives are published, and
measure it.

    python models/train/train.py tiny-glm4-moe --out out/tiny-glm4-moe

In: a model name. Out: a checkpoint folder (config, tokenizer, sharded BF16 safetensors with an
index) and `training.json` with the figures `measure.py` finds on the files. Target and MTP block
are trained together:

    loss = next token + 0.7 * draft position 1 + 0.3 * draft position 2 (recursive, as vLLM drafts)

The easy thing to get wrong is to call it reproducible across machines. The same seed gives the same
bytes on one machine with one thread count; another CPU sums in another order and ends elsewhere,
with about the same figures.
"""

import argparse
import json
import logging
import math
import platform
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import measure
import measure_docs
import measure_tools
import python_docs
import safetensors
import tiny_docs
import tiny_glm4_moe
import tiny_qwen3_5
import tiny_tools
import tokenizers
import tool_texts
import torch
import torch.nn.functional as F
import transformers
from drafting import Batch, draft_hidden, step_targets
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

MODELS: dict[str, ModuleType] = {
    "tiny-docs": tiny_docs,
    "tiny-glm4-moe": tiny_glm4_moe,
    "tiny-qwen3_5": tiny_qwen3_5,
    "tiny-tools": tiny_tools,
}
LOSS_WEIGHTS = (1.0, 0.7, 0.3)  # next token, draft position 1, draft position 2
WARMUP_STEPS = 50
FINAL_LR_FRACTION = 0.02
NUM_MEASURED_PROBLEMS = 400

log = logging.getLogger(__name__)


def run(
    name: str,
    *,
    out: Path,
    num_steps: int,
    stop_after: int,
    seed: int,
    threads: int,
) -> None:
    """Train, export to `<out>.partial`, measure what was written, then give the folder its name.

    Raises: FileExistsError if `out` or `<out>.partial` is there already.
    """
    partial = out.with_name(out.name + ".partial")
    if out.exists():
        raise FileExistsError(f"{out}: the folder must be new. Choose another --out or remove it.")
    partial.mkdir(parents=True)
    family = MODELS[name]
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(seed)

    tokenizer = family.TEXT.build_tokenizer(seed=seed)
    started = time.monotonic()
    target = family.build_target(family.build_config())
    mtp = family.build_mtp(target.config)
    _init_matrices(mtp, std=target.config.initializer_range)
    _train(
        family,
        target=target,
        mtp=mtp,
        batches=family.TEXT.batches(tokenizer, seed=seed),
        num_steps=num_steps,
        stop_after=stop_after,
    )
    seconds = time.monotonic() - started

    tensors = family.to_disk(target, mtp)
    tokenizer.save_pretrained(partial)
    _write_checkpoint(partial, target, tensors=tensors, num_shards=family.NUM_SHARDS)
    record = {
        "model": name,
        "seed": seed,
        "steps": stop_after,
        "schedule_steps": num_steps,
        "batch_size": family.TEXT.BATCH_SIZE,
        "threads": threads,
        "seconds": round(seconds),
        "loss_weights": list(LOSS_WEIGHTS),
        "num_parameters_target": sum(p.numel() for p in target.parameters()),
        "num_parameters_mtp": sum(p.numel() for p in mtp.parameters()),
        "versions": _versions(),
        "measured": asdict(_measured(family, partial)),
    }
    _write_json(partial / "training.json", record)
    partial.rename(out)
    log.info("%s: %d tensors, %d steps, %.0f s", out, len(tensors), num_steps, seconds)


def _train(
    family: ModuleType,
    *,
    target: PreTrainedModel,
    mtp: nn.Module,
    batches: Iterator[Batch],
    num_steps: int,
    stop_after: int,
) -> None:
    """Update both by `stop_after` batches, with the learning rates of a run of `num_steps`."""
    parameters = [*target.parameters(), *mtp.parameters()]
    optimizer = torch.optim.AdamW(
        parameters, lr=family.LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: _lr_factor(step, num_steps)
    )
    after_step = family.balance(target, mtp)
    target.train()
    mtp.train()
    for step in range(1, stop_after + 1):
        with torch.autocast(
            parameters[0].device.type, dtype=torch.bfloat16, enabled=family.COMPUTES_IN_BF16
        ):
            losses, hits = _losses(target, mtp, next(batches))
        loss = sum(weight * part for weight, part in zip(LOSS_WEIGHTS, losses, strict=True))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        after_step()
        if step == 1 or step % 50 == 0:
            shown = [
                f"{part.item():.3f}/{hit.item():.3f}"
                for part, hit in zip(losses, hits, strict=True)
            ]
            log.info(
                "step %d: loss/top-1 of next token, draft 1, draft 2: %s", step, "  ".join(shown)
            )


def _losses(
    target: PreTrainedModel, mtp: nn.Module, batch: Batch
) -> tuple[list[Tensor], list[Tensor]]:
    """Loss and top-1 rate (completion tokens only) of the next token and of each draft position."""
    hidden_BTH = target.model(batch.ids_BT, use_cache=False).last_hidden_state
    drafts = draft_hidden(
        mtp,
        target.model.embed_tokens,
        ids_BT=batch.ids_BT,
        hidden_BTH=hidden_BTH,
        num_steps=len(LOSS_WEIGHTS) - 1,
    )
    losses, hits = [], []
    for step, head_BTH in enumerate([hidden_BTH, *drafts]):
        logits_BTV = target.lm_head(head_BTH).float()
        wanted_BT, weight_BT = step_targets(batch.ids_BT, step), step_targets(batch.weight_BT, step)
        token_loss_BT = F.cross_entropy(logits_BTV.transpose(1, 2), wanted_BT, reduction="none")
        losses.append((token_loss_BT * weight_BT).sum() / weight_BT.sum())
        is_completion_BT = weight_BT == 1.0
        hits.append((logits_BTV.argmax(-1) == wanted_BT)[is_completion_BT].float().mean())
    return losses, hits


def _measured(
    family: ModuleType, folder: Path
) -> measure.Measured | measure_docs.MeasuredDocs | measure_tools.MeasuredTools:
    if family.TEXT is tool_texts:
        return measure_tools.measure(folder)
    if family.TEXT is python_docs:
        return measure_docs.measure(folder)
    return measure.measure(folder, num_problems=NUM_MEASURED_PROBLEMS)


def _lr_factor(step: int, num_steps: int) -> float:
    """Linear warm-up, then a cosine down to `FINAL_LR_FRACTION`."""
    warmup = min(1.0, (step + 1) / WARMUP_STEPS)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, step / num_steps)))
    return warmup * (FINAL_LR_FRACTION + (1 - FINAL_LR_FRACTION) * cosine)


def _init_matrices(module: nn.Module, *, std: float) -> None:
    """Matrices as transformers initialises the target's; norms and biases keep their constructors'
    values.
    """
    for name, parameter in module.named_parameters():
        if parameter.dim() >= 2:
            nn.init.normal_(parameter, std=std)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)


def _write_checkpoint(
    folder: Path, target: PreTrainedModel, *, tensors: dict[str, Tensor], num_shards: int
) -> None:
    target.config.architectures = [type(target).__name__]
    target.config.save_pretrained(folder)
    ids = {
        key: getattr(target.config, key) for key in ("pad_token_id", "bos_token_id", "eos_token_id")
    }
    GenerationConfig(**ids).save_pretrained(folder)
    total_bytes = sum(_num_bytes(tensor) for tensor in tensors.values())
    shards: list[dict[str, Tensor]] = [{} for _ in range(num_shards)]
    bytes_before = 0
    for name, tensor in tensors.items():
        shards[bytes_before * num_shards // total_bytes][name] = tensor
        bytes_before += _num_bytes(tensor)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = (
            "model.safetensors"
            if num_shards == 1
            else f"model-{number:05d}-of-{num_shards:05d}.safetensors"
        )
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    index = {
        "metadata": {"total_size": total_bytes},
        "weight_map": dict(sorted(weight_map.items())),
    }
    _write_json(folder / "model.safetensors.index.json", index)


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _versions() -> dict[str, str]:
    modules = (torch, transformers, tokenizers, safetensors)
    return {"python": platform.python_version()} | {
        module.__name__: module.__version__ for module in modules
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=sorted(MODELS))
    parser.add_argument("--out", type=Path, help="new folder (default: out/<model>)")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument(
        "--stop-after",
        type=int,
        help="end here, amid the schedule of --steps (default: at its end)",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--threads", type=int, default=1, help="part of what makes a run repeatable (default 1)"
    )
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    out = args.out or Path("out") / args.model
    stop = args.stop_after or args.steps
    run(
        args.model,
        out=out,
        num_steps=args.steps,
        stop_after=stop,
        seed=args.seed,
        threads=args.threads,
    )


if __name__ == "__main__":
    _main()
