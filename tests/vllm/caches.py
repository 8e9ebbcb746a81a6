"""Runs in vLLM's environment: what vLLM's own classes and functions say of a KV cache, on a pretended
GPU that has any number of bytes for it.

    python caches.py SITE_OF_IN_VLLM GPU < JOBS

A job is a line of JSON: a folder with config.json, `tp`, `k`, `length` of a request in tokens, `num_bytes` for
the cache, and further arguments of the engine. Its answer is a line: each layer's bytes for one block, its
tokens, and how many tokens and requests vLLM has room for. Each job has a process of its own: a process
group cannot be made twice.
"""

import importlib.util
import json
import os
import sys
import types
from typing import Any


def _answer(job: Any) -> dict[str, Any]:
    from dryload import stages, world
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.platforms import current_platform
    from vllm.utils.torch_utils import set_default_torch_dtype
    from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
    from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec
    from vllm.v1.worker.worker_base import WorkerBase

    import torch

    with open(f"{job.folder}/config.json") as file:
        declared = json.load(file)
    stages._know_config(declared)
    stages._leave_out_tokenizers(declared)
    speculative = None
    if job.k:
        speculative = {"method": job.method, "num_speculative_tokens": job.k}
    config = EngineArgs(
        model=job.folder,
        speculative_config=speculative,
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
        if model is models[0]:
            target = set(config.compilation_config.static_forward_context)
    current_platform.update_block_size_for_backend(config)
    register_all_kvcache_specs(config)
    specs = get_kv_cache_spec(config)
    layouts = WorkerBase.get_supported_kv_cache_layouts(types.SimpleNamespace(vllm_config=config))
    resolve_kv_cache_layout(config, [layouts], list(specs.values()))
    layers = []
    for name, spec in specs.items():
        window = getattr(spec, "sliding_window", None)
        row = (name in target, type(spec).__name__, spec.block_size, spec.page_size_bytes, window)
        layers.append(row)
    (cache,) = kv_cache_utils.get_kv_cache_configs(config, [specs], [job.num_bytes])
    tokens, requests = kv_cache_utils.get_kv_cache_capacity(config, cache)
    in_flight = config.max_in_flight_tokens
    return {"layers": layers, "blocks": cache.num_blocks, "groups": len(cache.kv_cache_groups), "tokens": tokens, "requests": requests,
            "in_flight": in_flight, "layout": config.cache_config.kv_cache_layout}


def main() -> None:
    """Answer every job of standard input."""
    package, gpu_name = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    spec = importlib.util.spec_from_file_location("dryload", f"{package}/__init__.py", submodule_search_locations=[package])
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
                answer = {"error": f"{type(error).__name__}: {error}"[:600]}
            answers.write(json.dumps({"job": vars(job), **answer}, default=str) + "\n")
            answers.flush()
            os._exit(0)
        os.wait()


if __name__ == "__main__":
    main()
