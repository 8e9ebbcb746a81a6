"""Runs in vLLM's environment: what vLLM's own classes and functions say of a KV cache.

    python caches.py FOLDER_OF_IN_VLLM GPU < JOBS

A job is a line of JSON: a `folder` with config.json, `tp`, `k`, the `length` of a request in tokens, and `further`
arguments of the engine. An answer is a line: the bytes that a token takes in all layers that keep every token. Each
job has a process of its own: process groups cannot be made twice.
"""

import importlib.util
import json
import os
import sys
import types
from typing import Any


def _answer(job: Any) -> dict[str, Any]:
    import torch
    from dryload import stages, world
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.platforms import current_platform
    from vllm.utils.torch_utils import set_default_torch_dtype
    from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

    with open(f"{job.folder}/config.json") as file:
        stages._know_config(json.load(file))
    config = EngineArgs(
        model=job.folder,
        speculative_config={"method": "mtp", "num_speculative_tokens": job.k} if job.k else None,
        enforce_eager=True,
        max_model_len=job.length,
        skip_tokenizer_init=True,
        tensor_parallel_size=job.tp,
        distributed_executor_backend="mp" if job.tp > 1 else None,
        **job.further,
    ).create_engine_config()
    world.init(config, tp=job.tp, rank=0)
    models = [config.model_config]
    if config.speculative_config is not None:
        models.append(config.speculative_config.draft_model_config)
    for model in models:
        with set_default_torch_dtype(model.dtype), torch.device("meta"):
            initialize_model(config, model_config=model)
    current_platform.update_block_size_for_backend(config)
    register_all_kvcache_specs(config)
    specs = get_kv_cache_spec(config)
    kept = [spec for spec in specs.values() if isinstance(spec, FullAttentionSpec)]
    return {"a_token": sum(spec.real_page_size_bytes / spec.block_size for spec in kept)}


def main() -> None:
    """Answer every job of standard input."""
    package, gpu_name = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    spec = importlib.util.spec_from_file_location(
        "dryload", f"{package}/__init__.py", submodule_search_locations=[package]
    )
    assert spec and spec.loader
    module = sys.modules["dryload"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    from dryload import server

    server._prepare(gpu_name, os.environ["VLLM_CACHE_ROOT"])
    for line in sys.stdin:
        job = types.SimpleNamespace(**json.loads(line))
        sys.stdout.flush()
        if not os.fork():
            try:
                answer = _answer(job)
            except Exception as error:  # noqa: BLE001  vLLM may raise anything, and the test shows it
                answer = {"error": f"{type(error).__name__}: {error}"}
            answers.write(json.dumps(answer, default=str) + "\n")
            os._exit(0)
        os.wait()


if __name__ == "__main__":
    main()
