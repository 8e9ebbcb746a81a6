"""Train one of the tiny checkpoints from nothing, and write it as its big relatives are published.

    python models/train/train.py tiny-glm4-moe --out out/tiny-glm4-moe

In: a name of `MODELS`. Out: a checkpoint folder (config, tokenizer, sharded BF16 safetensors with an
index) and `training.json`. Target and MTP block are trained together:

    loss = next token + 0.7 * draft position 1 + 0.3 * draft position 2 (recursive, as vLLM drafts)

The easy thing to get wrong is to call it reproducible across machines. The same versions give the
same bytes on one machine with one thread count; another CPU sums in another order and ends
elsewhere, with about the same figures.
"""

import argparse
import json
import math
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import problems
import python_docs
import safetensors
import tiny_docs
import tiny_glm4_moe
import tiny_qwen3_5
import tokenizers
import tool_texts
import torch
import torch.nn.functional as F
import transformers
from huggingface_hub import split_torch_state_dict_into_shards
from keepmtp.quantize.calibrate.mtp.mtp_block import draft_steps
from safetensors.torch import save_file
from texts import Batch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """One of the shipped models.

    Attributes:
        text: the module with its tokenizer and batches.
        family: the module with its target, MTP block and names on disk.
        sizes: keys of the config that are not the family's.
        shard_bytes: of a file on disk, at most.
        rate: of learning, at its highest.
        steps: batches.
        schedule: steps after which the rate would be at its lowest.
        threads: part of what makes a run repeatable.
        has_outliers: whether it is made hard to quantize; computes in BF16.
    """

    text: ModuleType
    family: ModuleType = tiny_glm4_moe
    sizes: Mapping[str, int] = field(default_factory=dict)
    shard_bytes: int = 5_000_000
    rate: float = 3e-3
    steps: int = 1000
    schedule: int = 1000
    threads: int = 1
    has_outliers: bool = False


MODELS = {
    "tiny-glm4-moe": Model(text=problems, shard_bytes=3_300_000, rate=2e-3),
    "tiny-qwen3_5": Model(text=problems, family=tiny_qwen3_5),
    "tiny-docs": Model(
        text=python_docs,
        sizes={"vocab_size": python_docs.VOCAB_SIZE, "intermediate_size": 512},
        shard_bytes=4_930_000,
        schedule=1250,
        threads=2,
        has_outliers=True,
    ),
    # No gated delta net: on a CPU vLLM 0.32 combines drafting with prefix caching for full
    # attention alone.
    "tiny-tools": Model(
        text=tool_texts,
        sizes={
            "vocab_size": tool_texts.VOCAB_SIZE,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
        },
        steps=250,
        schedule=250,
    ),
}
LOSS_WEIGHTS = (1.0, 0.7, 0.3)  # next token, draft position 1, draft position 2
WARMUP_STEPS = 50
FINAL_LR_FRACTION = 0.02
VERSIONS = (torch, transformers, tokenizers, safetensors)


def run(name: str, out: Path) -> None:
    """Train a model and write it to a new folder.

    Raises: FileExistsError if `out` is there already.
    """
    out.mkdir(parents=True)
    model = MODELS[name]
    torch.set_num_threads(model.threads)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    tokenizer = model.text.build_tokenizer()
    config = model.family.build_config()
    for key, value in model.sizes.items():
        setattr(config, key, value)
    target = model.family.TARGET(config).float()
    if model.has_outliers:
        tiny_docs.add_nothing_at_first(target)
    mtp = model.family.MTP(config)
    _init_matrices(mtp, std=config.initializer_range)
    _train(model, target, mtp, model.text.batches(tokenizer))
    tensors = model.family.to_disk(target, mtp)
    if model.has_outliers:
        tensors = tiny_docs.with_outliers(tensors)
    tokenizer.save_pretrained(out)
    _write_checkpoint(out, target, tensors, model.shard_bytes)
    versions = {module.__name__: module.__version__ for module in VERSIONS}
    record = {
        "model": name,
        "steps": model.steps,
        "schedule_steps": model.schedule,
        "threads": model.threads,
        "versions": {"python": platform.python_version(), **versions},
    }
    _write_json(out / "training.json", record)


def _train(model: Model, target: PreTrainedModel, mtp: nn.Module, batches: Any) -> None:
    """Update both, a batch a step."""
    parameters = [*target.parameters(), *mtp.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=model.rate, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: _lr_factor(step, model.schedule)
    )
    after_step = model.family.balance(target, mtp)
    target.train()
    mtp.train()
    for step in range(1, model.steps + 1):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=model.has_outliers):
            losses = _losses(target, mtp, next(batches))
        loss = sum(weight * part for weight, part in zip(LOSS_WEIGHTS, losses, strict=True))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        after_step()
        if step % 50 == 0:
            shown = "  ".join(f"{part.item():.3f}" for part in losses)
            print(f"step {step}: loss of next token, draft 1, draft 2: {shown}", flush=True)


def _losses(target: PreTrainedModel, mtp: Any, batch: Batch) -> list[Tensor]:
    """Of the next token and of each draft position."""
    hidden_BTH = target.model(batch.ids_BT, use_cache=False).last_hidden_state
    drafts = draft_steps(
        [mtp],
        target.model.embed_tokens,
        ids=batch.ids_BT,
        hidden=hidden_BTH,
        num_steps=len(LOSS_WEIGHTS) - 1,
    )
    losses = []
    # Slot i of step k predicts token i + k + 1; the target is step 0. Slots past the end weigh 0.
    for step, head_BTH in enumerate([hidden_BTH, *drafts], start=1):
        logits_BTV = target.lm_head(head_BTH).float()
        wanted_BT = F.pad(batch.ids_BT[:, step:], (0, step))
        weight_BT = F.pad(batch.weight_BT[:, step:], (0, step))
        token_loss_BT = F.cross_entropy(logits_BTV.transpose(1, 2), wanted_BT, reduction="none")
        losses.append((token_loss_BT * weight_BT).sum() / weight_BT.sum())
    return losses


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
    folder: Path, target: PreTrainedModel, tensors: dict[str, Tensor], shard_bytes: int
) -> None:
    config = target.config
    config.architectures = [type(target).__name__]
    config.save_pretrained(folder)
    ids = {key: getattr(config, key) for key in ("pad_token_id", "bos_token_id", "eos_token_id")}
    GenerationConfig(**ids).save_pretrained(folder)
    split = split_torch_state_dict_into_shards(tensors, max_shard_size=shard_bytes)
    for file, names in split.filename_to_tensors.items():
        shard = {name: tensors[name] for name in names}
        save_file(shard, folder / file, metadata={"format": "pt"})
    weight_map = dict(sorted(split.tensor_to_filename.items()))
    index = {"metadata": split.metadata, "weight_map": weight_map}
    _write_json(folder / "model.safetensors.index.json", index)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=sorted(MODELS))
    parser.add_argument("--out", type=Path, required=True, help="a new folder")
    args = parser.parse_args()
    run(args.model, args.out)
