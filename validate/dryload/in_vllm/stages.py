"""One checkpoint on one pretended GPU: construct, load, share, process, and say what happened.

In: a `Job`, in a process that `gpu.install` has prepared. Out: a JSON-able dictionary (`StagedLoad.account`), with the
fields of `LoadAccount` in validate/facts/dry_load.py, which reads it:

    path, quant_config
    load: {gpu, tp, k, ok, failure, target, draft, runner, seconds, peak_mib}
        failure: null or {stage, role, type, words, at, tensor}   vLLM's exception, and the tensor it was reading
        target, draft: {cls, num_params (that a checkpoint must fill), num_written, shared, kernels}
    target, draft: {asked, unwritten, default, partial, padded, casts, broadcasts}
    unconsumed: tensors that neither of the two used;  truncated: tensors used in part, at TP 1

Easy to get wrong: vLLM's exception is its verdict. Everything that vLLM may raise is caught here, in one place, and
nowhere else. Only vLLM's own code runs inside it.
"""

import contextlib
import json
import resource
import time
import traceback
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import safetensors
import torch

from . import cuda, experts, kernels, world
from .account import Account, Construction, Written
from .demands import demands_of
from .headers import meta_tensors

ROLES = ("target", "draft")
# Of parameters that are not filled as they should be.
STATUSES = ("unwritten", "default", "partial", "padded")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to load.

    Attributes:
        path: folder with config.json, the index and safetensors files; the files may hold headers and no data.
        tp: tensor-parallel size.
        rank: the rank of it that is built.
        num_drafts: num_speculative_tokens; 0 for the target alone.
        draft: folder of a separate draft model, "" if the draft is in the checkpoint.
    """

    path: str
    tp: int = 1
    rank: int = 0
    num_drafts: int = 1
    draft: str = ""


@dataclass(slots=True)
class Part:
    """What became of the target or the draft."""

    cls: str = ""
    num_params: int = 0
    asked: list[tuple[Any, str, str, str]] = field(default_factory=list)
    paths: dict[int, str] = field(default_factory=dict)
    shared: list[str] = field(default_factory=list)
    kernels: list[dict[str, Any]] = field(default_factory=list)


class Refused(Exception):
    """vLLM raised; `failure` says what."""

    def __init__(self, failure: dict[str, Any]):
        super().__init__(failure["words"])
        self.failure = failure


class StagedLoad:
    """The dry load of one job, stage by stage."""

    def __init__(self, job: Job, *, gpu: str):
        self._job = job
        self._gpu = gpu
        self._seconds: dict[str, float] = {}
        self._parts = {role: Part() for role in ROLES}
        self._accounts: dict[str, Account] = {}
        self._models: dict[str, Any] = {}
        self._failure: dict[str, Any] | None = None
        self._asking = self._parts["target"].asked
        self._runner = self._quant_config = ""

    def account(self) -> dict[str, Any]:
        """Run all stages; the first that vLLM refuses ends them."""
        try:
            self._run()
        except Refused as refused:
            self._failure = refused.failure
        peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        own = {role: self._own(role) for role in ROLES}
        load = {
            "gpu": self._gpu,
            "tp": self._job.tp,
            "k": self._job.num_drafts,
            "ok": self._failure is None,
            "failure": self._failure,
            **{role: self._loaded(role, own[role]) for role in ROLES},
            "runner": self._runner,
            "seconds": round(sum(self._seconds.values()), 2),
            "peak_mib": peak_kib >> 10,
        }
        return {
            "path": self._job.path,
            "load": load,
            **{role: self._written(role, own[role]) for role in ROLES},
            **self._tensors(),
            "quant_config": self._quant_config,
        }

    def _run(self) -> None:
        with self._stage("config", ""):
            self._config = config = _engine_config(self._job)
        self._quant_config = type(config.quant_config).__name__ if config.quant_config else ""
        self._runner = "v2" if config.use_v2_model_runner else "v1"
        record_questions(lambda *question: self._asking.append(question))
        experts.install(lambda: self._current)
        with self._stage("world", ""):
            world.init(config, tp=self._job.tp, rank=self._job.rank)
        model_configs = {"target": config.model_config}
        if config.speculative_config is not None:
            model_configs["draft"] = config.speculative_config.draft_model_config
        for role, model_config in model_configs.items():
            with self._stage("construct", role):
                self._construct(role, model_config)
            with self._stage("load", role):
                self._load(role, model_config)
        if "draft" in model_configs:
            with self._stage("share", "draft"):
                self._share()
        for role in model_configs:
            with self._stage("process", role):
                self._parts[role].kernels = kernels.process(self._models[role], self._config)

    @property
    def _current(self) -> str:
        return self._account.current if self._accounts else ""

    @contextlib.contextmanager
    def _stage(self, stage: str, role: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        except Exception as error:  # vLLM may raise anything, and that is its verdict
            raise Refused(
                {
                    "stage": stage,
                    "role": role,
                    "type": type(error).__name__,
                    "words": str(error)[:2000],
                    "at": _last_frame(error),
                    "tensor": self._current if stage == "load" else "",
                }
            ) from error
        finally:
            self._seconds[f"{role} {stage}".strip()] = round(time.perf_counter() - start, 3)

    def _construct(self, role: str, model_config: Any) -> None:
        from vllm.model_executor.model_loader.utils import initialize_model
        from vllm.utils.torch_utils import set_default_torch_dtype

        self._asking = self._parts[role].asked
        self._construction = Construction()
        with set_default_torch_dtype(model_config.dtype), torch.device("meta"), self._construction:
            model = initialize_model(self._config, model_config=model_config)
        self._models[role] = model
        self._parts[role].paths = {id(module): path for path, module in model.named_modules()}
        self._parts[role].cls = type(model).__name__
        self._parts[role].num_params = sum(1 for _ in model.parameters())

    def _load(self, role: str, model_config: Any) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.config.load import LoadConfig
        from vllm.model_executor.model_loader import default_loader, weight_utils

        model = self._models[role]
        account = self._account = self._accounts[role] = Account(model, self._construction, demands_of(model))
        # vLLM's own reader chooses the files; only the tensors are replaced.
        default_loader.safetensors_weights_iterator = lambda files, *args, **kwargs: account.hand_over(
            meta_tensors(files)
        )
        # For "pt", safe_open maps the whole file as memory that could be written: that counts like an allocation
        # (server.py: limit_memory), and a shard may be larger than the limit. For "np" it maps the file to be read.
        weight_utils.safe_open = lambda path, framework: safetensors.safe_open(path, framework="np")
        loader = default_loader.DefaultModelLoader(LoadConfig(use_tqdm_on_load=False))
        loader.counter_before_loading_weights = time.perf_counter()
        try:
            with set_current_vllm_config(self._config), cuda.weights_only(), account:
                loader.load_weights(model, model_config)
        finally:
            account.settle(model)

    def _share(self) -> None:
        """vLLM's own code replaces the draft's embedding and head, as it does after loading."""
        from vllm.config import set_current_vllm_config

        draft = self._models["draft"]
        before = dict(draft.named_parameters(remove_duplicate=False))
        cpu, equal = torch.Tensor.cpu, torch.equal
        torch.Tensor.cpu = lambda tensor, *args, **kwargs: tensor  # type: ignore[method-assign]
        torch.equal = lambda left, right: False  # values are unknown here, so a copy counts as different
        try:
            with set_current_vllm_config(self._config):
                share = _share_v2 if self._runner == "v2" else _share_v1
                share(self._models["target"], draft, self._config)
        finally:
            torch.Tensor.cpu, torch.equal = cpu, equal  # type: ignore[method-assign]
        after = dict(draft.named_parameters(remove_duplicate=False))
        self._parts["draft"].shared = sorted(name for name in before if after.get(name) is not before[name])

    def _own(self, role: str) -> list[tuple[Written, str]] | None:
        """The parameters that a checkpoint must fill, with their status; None where nothing was loaded.

        Shared and optional parameters are not among them.
        """
        if role not in self._accounts:
            return None
        shared = set(self._parts[role].shared)
        params = [(param, param.status) for param in self._accounts[role].params if param.name not in shared]
        return [(param, status) for param, status in params if status != "optional"]

    def _loaded(self, role: str, own: list[tuple[Written, str]] | None) -> dict[str, Any]:
        part = self._parts[role]
        return {
            "cls": part.cls,
            "num_params": part.num_params if own is None else len(own),
            "num_written": sum(1 for _, status in own or () if status in ("full", "padded")),
            "shared": part.shared,
            "kernels": part.kernels,
        }

    def _written(self, role: str, own: list[tuple[Written, str]] | None) -> dict[str, Any]:
        part = self._parts[role]
        asked = [
            {
                "prefix": prefix,
                "layer": type(layer).__name__,
                "method": method,
                "scheme": scheme,
                "path": part.paths.get(id(layer), ""),
            }
            for layer, prefix, method, scheme in part.asked
        ]
        if own is None:
            return {"asked": asked}
        account = self._accounts[role]
        names = {param.name for param, _ in own}
        return {
            "asked": asked,
            **{wanted: [_fault(param) for param, status in own if status == wanted] for wanted in STATUSES},
            "casts": [_misfit(note) for note in account.casts if note[0] in names],
            "broadcasts": [_misfit(note) for note in account.broadcasts if note[0] in names],
        }

    def _tensors(self) -> dict[str, Any]:
        seen = {name for account in self._accounts.values() for name in account.tensors}
        used: dict[str, int] = {}
        sizes: dict[str, int] = {}
        for account in self._accounts.values():
            for name, tensor in account.tensors.items():
                if tensor.is_used:
                    used[name] = max(used.get(name, 0), tensor.num_read)
                    sizes[name] = tensor.num_elements
        truncated = [[name, used[name], sizes[name]] for name in used if used[name] < sizes[name]]
        return {"unconsumed": sorted(seen - used.keys()), "truncated": truncated if self._job.tp == 1 else []}


def _last_frame(error: BaseException) -> str:
    """file:line of the last frame in vLLM itself, not in a library that it called."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "site-packages/vllm/" in frame.filename] or frames
    return f"{own[-1].filename.rpartition('site-packages/')[2]}:{own[-1].lineno}"


def _fault(param: Written) -> dict[str, Any]:
    return {
        "param": param.name,
        "num_written": param.num_written,
        "num_expected": param.num_expected,
        "dtype": str(param.dtype).removeprefix("torch."),
        "sources": param.sources,
    }


def _misfit(note: tuple[str, str, str, str]) -> dict[str, str]:
    return dict(zip(("param", "tensor", "given", "wanted"), note, strict=True))


def _engine_config(job: Job) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    speculative: dict[str, Any] | None = None
    if job.num_drafts:
        speculative = {"method": "mtp", "num_speculative_tokens": job.num_drafts}
    if speculative is not None and job.draft:
        speculative["model"] = job.draft
    with open(f"{job.path}/config.json") as file:
        declared = json.load(file)
    _know_config(declared)
    _leave_out_tokenizers(declared)
    text_config = declared.get("text_config") or declared.get("llm_config") or declared
    longest = text_config.get("max_position_embeddings", 256)
    return EngineArgs(
        model=job.path,
        speculative_config=speculative,
        enforce_eager=True,
        max_model_len=min(256, longest),
        skip_tokenizer_init=True,
        tensor_parallel_size=job.tp,
        distributed_executor_backend="mp" if job.tp > 1 else None,
    ).create_engine_config()


def _know_config(declared: dict[str, Any]) -> None:
    """Config classes that come with a checkpoint (auto_map) become config.json's keys: its code never runs.

    A key that holds the config of a known model, such as text_config, becomes that model's config.
    """
    from transformers import AutoConfig, PretrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    model_type = declared.get("model_type", "")
    if "auto_map" not in declared or model_type in CONFIG_MAPPING or model_type in _CONFIG_REGISTRY:
        return

    class ConfigKeys(PretrainedConfig):
        @classmethod
        def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
            inner = {
                key: CONFIG_MAPPING[value["model_type"]](**value)
                for key, value in config_dict.items()
                if isinstance(value, dict) and value.get("model_type") in CONFIG_MAPPING
            }
            if "llm_config" in inner:  # Nemotron Omni's class has it under both names
                inner.setdefault("text_config", inner["llm_config"])
            return super().from_dict({**config_dict, **inner}, **kwargs)

    ConfigKeys.model_type = model_type
    AutoConfig.register(model_type, ConfigKeys)


def _leave_out_tokenizers(declared: dict[str, Any]) -> None:
    """Tokenizers that a model's class wants, of words or of sounds: no dry load has them, no weight depends on them.

    Nemotron Omni's class asks for the numbers of three words; MiMo-V2.5's audio encoder loads a folder of its own.
    """
    architectures = declared.get("architectures") or ()
    if any(name.startswith("NemotronH_") for name in architectures):
        from vllm.model_executor.models import nano_nemotron_vl

        tokenizer = types.SimpleNamespace(encode=lambda words, **_: [0])
        nano_nemotron_vl.cached_tokenizer_from_config = lambda config: tokenizer
    if any(name.startswith("MiMoV2") for name in architectures):
        from vllm.model_executor.models.mimo_audio import MimoAudioEncoder

        MimoAudioEncoder._load_audio_tokenizer = staticmethod(lambda path, device: None)


def _share_v2(target: Any, draft: Any, config: Any) -> None:
    from vllm.v1.worker.gpu.spec_decode.eagle import utils

    utils.get_model = lambda **kwargs: draft
    utils.load_eagle_model(target, config)


def _share_v1(target: Any, draft: Any, config: Any) -> None:
    from vllm.model_executor.models import supports_multimodal
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer as Proposer

    language_model = target.get_language_model() if supports_multimodal(target) else target
    proposer: Any = types.SimpleNamespace(
        model=draft, vllm_config=config, use_local_argmax_reduction=False, speculative_config=config.speculative_config
    )
    Proposer._maybe_share_embeddings(proposer, language_model)
    Proposer._maybe_share_lm_head(proposer, language_model)


def record_questions(note: Any) -> None:
    """Call `note` with every question to a quantization config of this process: layer, prefix, method, scheme.

    A config may ask another one; only the outer question counts.
    """
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

    depth = [0]

    def recorded(method: Any) -> Any:
        def get_quant_method(config: Any, layer: Any, prefix: str, *args: Any, **kwargs: Any) -> Any:
            depth[0] += 1
            try:
                answer = method(config, layer, prefix, *args, **kwargs)
            finally:
                depth[0] -= 1
            if depth[0] == 0:
                scheme = getattr(layer, "scheme", None)
                note(
                    layer,
                    prefix,
                    type(answer).__name__ if answer else "",
                    type(scheme).__name__ if scheme is not None else "",
                )
            return answer

        return get_quant_method

    pending = list(QuantizationConfig.__subclasses__())
    while pending:
        cls = pending.pop()
        pending += cls.__subclasses__()
        if "get_quant_method" in cls.__dict__:
            cls.get_quant_method = recorded(cls.__dict__["get_quant_method"])
