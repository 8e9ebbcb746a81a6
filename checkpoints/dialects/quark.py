"""`quant_method: quark`: what vLLM builds for a module.

In: quantization_config. Out: a `Quark` as vLLM reads it.

Easy to get wrong: an entry of `exclude` is a whole name or `re:` from the start, so a glob excludes
nothing. What nothing excludes has the scheme of its layer.

Source: vLLM 0.32.0 quantization/quark/quark.py (_get_scheme_cls_from_config), quark_moe.py
(get_moe_method_target), quark/utils.py, quark/schemes, utils/ocp_mx_utils.py,
quantization/utils/config_utils.py. Compared with the real functions by tests/checkpoints/dialects.
"""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatch, fnmatchcase

from ...recipes.family import VLLMName
from ...recipes.frozen import frozen
from ...recipes.renamer import Renamer
from ..stored import Form
from .dialect import UNKNOWN, Dialect, Exceptions, Kind, Resolution, VLLMModule
from .given import QuarkExport, QuarkGiven, QuarkLayer, QuarkTensor, Raw, read_given
from .matching import SCHEMES_DIFFER, named, plain, raises, registers
from .patterns import Entries, equal_or_regex

_NO_EXPORT = (
    "ValueError: The export key should be included in the configurations of Quark quantized model"
)
_NO_LAYER_TYPES = (
    "AttributeError: 'NoneType' object has no attribute 'get' (layer_type_quant_config is missing)"
)
_NO_SCHEME = "it has no scheme of Quark's with these weights and inputs"
_TWO = frozenset({"weight", "weight_scale"})
_ONE_FP8_SCALE = ("fp8_e4m3", "per_tensor", False)
_MX_DTYPES = ("fp4", "fp6_e3m2", "fp6_e2m3", "fp8_e4m3")
_MX_FORMS: Mapping[str, Form] = {"fp4": "mxfp4", "fp8_e4m3": "mxfp8"}


@frozen
class Quark(Dialect):
    """`quant_method: quark`.

    Attributes:
        exclude: entries after renaming.
        layers: layer_quant_config, after renaming.
        usual: what holds for every other module.
    """

    given: QuarkGiven

    exclude: Entries
    layers: Mapping[str, QuarkLayer]
    usual: QuarkLayer
    name: str = "quark"

    # Whole names, and expressions.
    exceptions = Exceptions(("exclude",), of_stem="re:^{}.*")

    def resolve(self, module: VLLMName, *, shards: Sequence[VLLMName], kind: Kind) -> Resolution:
        """`should_ignore_layer`, then the config of the layer; heads are never quantized."""
        export = self.given.export
        if export is None:
            return raises(_NO_EXPORT)
        if kind == "head":
            return plain()
        is_experts = kind == "experts"
        parts: Sequence[str] = shards
        if is_experts:
            parts = ()
            # One entry for one expert leaves all of the layer plain.
            for entry in self.exclude.written:
                if entry == module or entry.startswith(f"{module}."):
                    return plain(entry)
        answer = named(module, parts, self.exclude.first, SCHEMES_DIFFER)
        if answer is not None:
            return answer
        if self.given.layer_type_quant_config is None:
            return raises(_NO_LAYER_TYPES)
        names = parts or (module,)
        entry, layer = self.layer_of(names[0])
        for name in names[1:]:
            if self.layer_of(name)[1] != layer:
                return raises(SCHEMES_DIFFER.format(module), entry, "shards")
        built = scheme_of(layer, export.pack_method, is_experts=is_experts)
        if isinstance(built, str):
            return raises(built, entry)
        if is_experts and built.form == "mxfp4":
            # They load a scale of their inputs, if there is one.
            built = built._replace(optional=built.optional | {"input_scale"})
        return Resolution(built, entry)

    def hits(self, read: Sequence[str], name: str) -> bool:
        """Whole name, `re:` from the start, or a name below that of routed experts."""
        (word,) = read
        if name.endswith(".experts") and word.startswith(f"{name}."):
            return True
        return equal_or_regex(name, word)

    def layer_of(self, name: str) -> tuple[str, QuarkLayer]:
        """The pattern that decides a name, "" for none, and what holds there."""
        for pattern, layer in self.layers.items():
            is_part = name in pattern and "*" not in pattern
            if is_part or fnmatch(name, pattern):
                return pattern, layer
        return "", self.usual


def read_quark(raw: Raw, rename: Renamer) -> Quark:
    """The config as vLLM reads it, entries renamed.

    Raises:
        CheckpointError: a key has another type than is read, or an entry is no regular expression.
    """
    given = read_given(QuarkGiven, raw)
    group = (given.export or QuarkExport()).kv_cache_group
    layers = dict[str, QuarkLayer]()
    for name, layer in given.layer_quant_config.items():
        # Outputs of the layers of the cache are not those of the layer: vLLM takes them out.
        is_cache = any(fnmatchcase(name, pattern) for pattern in group)
        if is_cache or (group and name == "*q_proj"):
            layer = layer.model_copy(update={"output_tensors": None})
        layers[rename.name(name)] = layer
    return Quark(
        given=given,
        exclude=Entries(map(rename.name, given.exclude)),
        layers=layers,
        usual=given.global_quant_config,
        rename=rename,
        listed={"exclude": given.exclude},
    )


def scheme_of(layer: QuarkLayer, pack_method: str, *, is_experts: bool) -> VLLMModule | str:
    """What a layer that is not excluded builds, unknown where the check does not know its
    tensors, or why vLLM raises.
    """
    weights = _listed(layer.weight)
    inputs = _listed(layer.input_tensors)
    if layer.output_tensors or layer.bias or not weights:
        return _NO_SCHEME
    built = None
    # Two are NVFP4 with its common scale, or for experts also integers inside FP8.
    if len(weights) > 1 or len(inputs) > 1:
        built = _of_lists(weights, inputs, is_experts=is_experts)
    elif inputs:
        built = _with_inputs(weights[0], inputs[0], is_experts=is_experts)
    elif weights[0].dtype in ("int4", "uint4") and pack_method in ("order", "reorder"):
        built = UNKNOWN
    else:
        built = _mx(weights[0])
    return built or _NO_SCHEME


def _with_inputs(
    weight: QuarkTensor, inputs: QuarkTensor, *, is_experts: bool
) -> VLLMModule | None:
    leaves = list[str]()
    is_dynamic = inputs.is_dynamic
    if not is_dynamic:
        leaves.append("input_scale")
    is_static_fp8 = inputs.kind == _ONE_FP8_SCALE
    takes_fp8 = is_static_fp8 or (is_dynamic and inputs.dtype == "fp8_e4m3")
    match weight.kind:
        case "fp8_e4m3", "per_tensor", False if takes_fp8:
            return registers("fp8_tensor", *leaves)
        case "fp8_e4m3", "per_channel", False if takes_fp8:
            return registers("fp8_channel", *leaves, scale_ndim=1)
        case "fp8_e4m3", "per_block", False if takes_fp8:
            are_groups = inputs.qscheme == "per_group" and inputs.group_size == 128
            are_blocks = weight.block_size == (128, 128) and are_groups
            if weight.symmetric and inputs.symmetric and are_blocks:
                return registers("fp8_block", block=(128, 128))
        case "int8", "per_channel" | "per_tensor", is_computed if weight.symmetric:
            is_static = inputs.kind == ("int8", "per_tensor", False) and not is_computed
            if is_static or inputs.kind == ("int8", "per_channel", True):
                if weight.qscheme == "per_tensor":
                    return UNKNOWN
                zeros = frozenset({"weight_zero_point", "input_zero_point"})
                return registers("int8", *leaves, optional=zeros)
    if is_dynamic and inputs.dtype in _MX_DTYPES:
        return _mx(weight)
    # Static inputs are FP8 of one scale, and outside experts only of FP4.
    takes_static = is_experts or weight.kind == ("fp4", "per_group", False)
    if is_static_fp8 and inputs.symmetric and takes_static:
        return _mx(weight, "input_scale")
    return None


def _of_lists(
    weights: Sequence[QuarkTensor], inputs: Sequence[QuarkTensor], *, is_experts: bool
) -> VLLMModule | None:
    if len(weights) != 2:
        return None
    kinds = [tensor.kind for tensor in (*weights, *inputs)]
    of_nvfp4 = [
        ("fp4", "per_group", False),
        _ONE_FP8_SCALE,
        ("fp4", "per_group", True),
        _ONE_FP8_SCALE,
    ]
    if kinds == of_nvfp4 and weights[0].group_size == inputs[0].group_size == 16:
        # modelopt calls the inputs' scale `input_scale`.
        return registers("nvfp4_modelopt", "input_scale_2")
    if is_experts and kinds[1] == ("int4", "per_channel", False):
        return UNKNOWN
    return None


def _mx(weight: QuarkTensor, *of_inputs: str) -> VLLMModule | None:
    """What weights in groups of 32 with scales of eight bits register; None for others."""
    is_grouped = weight.group_size == 32 and weight.scale_format == "e8m0"
    if weight.qscheme == "per_group" and is_grouped:
        if weight.dtype in _MX_FORMS:
            return registers(_MX_FORMS[weight.dtype], leaves=_TWO.union(of_inputs))
        if weight.dtype in _MX_DTYPES:
            return UNKNOWN
        return None
    is_block = weight.kind == ("fp8_e4m3", "per_block", False) and weight.symmetric
    columns = weight.block_size[1:]
    if is_block and weight.scale_type == "float8_e8m0fnu" and columns == (32,):
        return UNKNOWN
    return None


def _listed(given: QuarkTensor | tuple[QuarkTensor, ...]) -> Sequence[QuarkTensor]:
    """A list of one is as good as the one."""
    if isinstance(given, QuarkTensor):
        return [given]
    return given
