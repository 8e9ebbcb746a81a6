"""A quantization config as its file gives it: the keys that the servers read, each with its type.

In: quantization_config, or hf_quant_config.json, from anybody. Out: a model for each dialect, or a
refusal that names the key.

Easy to get wrong: vLLM goes through `targets` and `ignore` item by item, so a text where a list
belongs would be read letter by letter.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from ...recipes.errors import CheckpointError, first_fault
from ...recipes.frozen import Raw, without_none

_LARGEST = 2**31 - 1  # larger than any group or block that a kernel has
_Size = Annotated[int, Field(ge=1, le=_LARGEST)]
# What is no power of two a kernel of vLLM's has no tile for, and the scales' shape does not show.
_Side = Literal[1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
_Group = Annotated[int, Field(ge=-1, le=_LARGEST)]
_Bits = Annotated[int, Field(strict=True, ge=1, le=32)]
_Algorithm = Annotated[str, StringConstraints(to_upper=True)]
_Names = tuple[str, ...]


class _Given(BaseModel):
    # Keys that keepmtp does not read are not looked at: they differ from tool to tool.
    model_config = ConfigDict(frozen=True, extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, raw: Any) -> Any:
        """Null is as good as no value."""
        if isinstance(raw, Mapping):
            return without_none(raw)
        return raw


class GivenArguments(_Given):
    """compressed-tensors' QuantizationArgs, with its defaults; `strategy` is "" where it follows
    from the others.
    """

    num_bits: Annotated[int, Field(ge=1, le=64)] = 8
    type: str = "int"
    strategy: str = ""
    symmetric: bool = True
    dynamic: bool | str = False
    group_size: _Group | None = None
    block_structure: tuple[_Side, _Side] | None = None
    actorder: bool | str | None = None
    scale_dtype: str | None = None

    @property
    def is_reordered(self) -> bool:
        """Whether input channels belong to groups in an order of their own, `weight_g_idx`."""
        return str(self.actorder).lower() in ("group", "dynamic", "true")


class GivenGroup(_Given):
    """One of compressed-tensors' `config_groups`."""

    targets: _Names = ()
    format: str | None = None
    weights: GivenArguments | None = None
    input_activations: GivenArguments | None = None


class CompressedTensorsGiven(_Given):
    """`quant_method: compressed-tensors`."""

    config_groups: Mapping[str, GivenGroup] = {}
    format: str | None = None
    ignore: _Names = ()


class ModuleAlgorithm(_Given):
    """One of modelopt's `quantized_layers`."""

    quant_algo: _Algorithm = ""
    group_size: _Size = 128


class ModelOptInner(_Given):
    """What modelopt writes at top level in config.json, and under `quantization` in
    hf_quant_config.json.
    """

    quant_algo: _Algorithm = ""
    ignore: _Names | None = None
    exclude_modules: _Names | None = None
    ignored_layers: _Names = ()
    quantized_layers: Mapping[str, ModuleAlgorithm] = {}
    group_size: Annotated[int, Field(ge=0, le=_LARGEST)] = 0


class ModelOptGiven(ModelOptInner):
    """`quant_method: modelopt`, or hf_quant_config.json."""

    quant_method: str | None = None
    quantization: ModelOptInner | None = None
    config_groups: Mapping[str, Raw] = {}


class Fp8Given(_Given):
    """`quant_method: fp8`."""

    ignored_layers: _Names = ()
    modules_to_not_convert: _Names = ()
    ignore: _Names = ()
    weight_block_size: tuple[_Side, _Side] | None = None
    activation_scheme: Literal["dynamic", "static"]
    moe_quant_algo: _Algorithm = ""

    @field_validator("activation_scheme")
    @classmethod
    def _blocks_are_dynamic(cls, scheme: str, info: ValidationInfo) -> str:
        """vLLM 0.33.0 quantization/fp8.py, Fp8Config: blocks have no static scales of inputs."""
        if scheme == "static" and info.data.get("weight_block_size"):
            rule = "must be dynamic with weight_block_size"
            raise CheckpointError("", rule, got=scheme, cure="Set it to dynamic")
        return scheme


class GptqModules(_Given):
    """What one of GPTQ's `dynamic` says of the modules that it matches."""

    bits: _Bits | None = None
    group_size: _Group | None = None
    desc_act: bool | None = None
    sym: bool | None = None


class GptqGiven(GptqModules):
    """`quant_method: gptq`; vLLM wants the four of `GptqModules`."""

    lm_head: bool = False
    dynamic: Mapping[str, GptqModules | None] = {}
    modules_in_block_to_quantize: tuple[str | _Names, ...] = ()


class AwqGiven(_Given):
    """`quant_method: awq`; vLLM wants one of each of the first two pairs, and zero_point."""

    w_bit: _Bits | None = None
    bits: _Bits | None = None
    q_group_size: _Group | None = None
    group_size: _Group | None = None
    zero_point: bool | None = None
    lm_head: bool = False
    modules_to_not_convert: _Names = ()


class AutoRoundException(_Given):
    """One of AutoRound's `extra_config`."""

    bits: _Bits | None = None
    group_size: Any = None
    sym: bool | None = None


class AutoRoundGiven(AutoRoundException):
    """`quant_method: auto-round`."""

    data_type: str = "int"
    packing_format: str | None = None
    backend: str = ""
    vllm_backend: str = "auto"
    block_name_to_quantize: str | _Names = ()
    to_quant_block_names: str | _Names = ()
    extra_config: Mapping[str, AutoRoundException] = {}


class QuarkTensor(_Given):
    """How quark quantizes weights or inputs."""

    dtype: str = ""
    qscheme: str = ""
    group_size: int = 0
    is_dynamic: bool = False
    symmetric: bool = False
    scale_format: str = ""
    scale_type: str = ""
    block_size: tuple[_Size, ...] = ()

    @property
    def kind(self) -> tuple[str, str, bool]:
        """What its numbers are, what has a scale, and whether that is computed as the model
        runs.
        """
        return self.dtype, self.qscheme, self.is_dynamic


_QuarkTensors = QuarkTensor | tuple[QuarkTensor, ...]


class QuarkLayer(_Given):
    """One of quark's configs of a layer."""

    weight: _QuarkTensors = ()
    input_tensors: _QuarkTensors = ()
    output_tensors: Any = None
    bias: Any = None


class QuarkExport(_Given):
    """How quark wrote the weights; `kv_cache_group` names the layers whose outputs are the
    cache.
    """

    kv_cache_group: _Names = ()
    pack_method: str = ""


class QuarkGiven(_Given):
    """`quant_method: quark`; vLLM wants `export`."""

    export: QuarkExport | None = None
    exclude: _Names = ()
    global_quant_config: QuarkLayer = QuarkLayer()
    layer_type_quant_config: Raw | None = None
    layer_quant_config: Mapping[str, QuarkLayer] = {}


_Form = TypeVar("_Form", bound=_Given)


def read_given(form: type[_Form], raw: Raw) -> _Form:
    """The config in the types of its dialect.

    Raises:
        CheckpointError: a key has another type; `where` is left to the caller, who knows the file.
    """
    try:
        return form.model_validate(raw)
    except ValidationError as error:
        rule = "must have the types that vLLM reads"
        cure = "Take it from the release that it was made from, or export the checkpoint again"
        raise CheckpointError("", rule, got=first_fault(error), cure=cure) from error
