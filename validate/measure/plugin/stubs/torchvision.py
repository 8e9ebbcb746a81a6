"""Stands in for torchvision in vLLM's environment: text models import its names and never call
them.

The package index has no CPU build of torchvision, and its CUDA build does not import without CUDA's
libraries.
"""

import sys
from unittest.mock import MagicMock

__version__ = "0.28.0"
for part in ("io", "transforms", "transforms.functional", "transforms.v2"):
    sys.modules[f"{__name__}.{part}"] = MagicMock()
sys.modules[f"{__name__}.transforms.v2.functional"] = MagicMock()
