"""Weights of a finished checkpoint as compressed-tensors alone reads them."""

from collections.abc import Mapping

from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from keepmtp.recipes.schemes import SCHEMES
from torch import Tensor


def decompressed(scheme: str, module: str, tensors: Mapping[str, Tensor]) -> Tensor:
    """A module's weight, BF16."""
    args = QuantizationScheme(targets=["Linear"], **SCHEMES[scheme].config_group())
    leaves = (spec.suffix for spec in SCHEMES[scheme].weight_tensors(128, 128))
    parts = {leaf: tensors[f"{module}.{leaf}"] for leaf in leaves}
    compressor = BaseCompressor.get_value_from_registry(SCHEMES[scheme].format)
    return compressor.decompress(parts, args)["weight"].bfloat16()
