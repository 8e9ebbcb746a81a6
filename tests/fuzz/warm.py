"""Everything that the command may import, imported once, and its entry point.

In: nothing. Out: `main`. Importing starts no thread and computes nothing, so the process can be
forked.
"""

import importlib
import pkgutil

import keepmtp
import keepmtp.cli
from keepmtp.cli.main import main as main

for _floor in ("recipes", "checkpoints", "quantize", "validate", "cure"):
    _package = importlib.import_module(f"keepmtp.{_floor}")
    for _found in pkgutil.walk_packages(_package.__path__, f"keepmtp.{_floor}."):
        if (
            "in_vllm" not in _found.name
            and "plugin" not in _found.name
            and "calibrate" not in _found.name
        ):
            importlib.import_module(_found.name)
for _found in pkgutil.iter_modules(keepmtp.cli.__path__):
    importlib.import_module(f"keepmtp.cli.{_found.name}")
