"""A folder that vLLM can read a checkpoint from, without its data.

In: an opened checkpoint. Out: its own folder; for a Hub repository a temporary folder with its
headers, and holes where the data would be.

Easy to get wrong: vLLM's config classes read more files than config.json.
"""

import contextlib
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from ...checkpoints.files import within
from ...checkpoints.safetensors_file import Entry, lay_out
from ...checkpoints.scratch import ScratchFolder
from ...checkpoints.source import INDEX, SINGLE, Source, small_bytes

# What vLLM's config classes read, config.json apart.
SMALL_FILES = (
    "hf_quant_config.json",
    "generation_config.json",
    "added_tokens.json",
    "preprocessor_config.json",
)


@contextlib.contextmanager
def headers_of(source: Source) -> Iterator[Path]:
    """A folder that vLLM can read `source` from."""
    if source.folder is not None:
        yield source.folder
        return
    with ScratchFolder("keepmtp-headers-") as folder:
        (folder / "config.json").write_text(json.dumps(source.config))
        for name in SMALL_FILES:
            if (data := small_bytes(source, name)) is not None:
                (folder / name).write_bytes(data)
        files: dict[str, list[Entry]] = defaultdict(list)
        for entry in source.entries.values():
            files[entry.file].append(entry)
        for file, entries in files.items():
            write_headers(within(folder, file), entries)
        if set(files) != {SINGLE}:
            weight_map = {entry.name: entry.file for entry in source.entries.values()}
            (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        yield folder


def write_headers(path: Path, entries: Iterable[Entry]) -> None:
    """A safetensors file of these tensors, in their order, with a hole where their data would
    be.
    """
    ordered = sorted(entries, key=lambda entry: entry.start)
    layout = lay_out([(entry.name, entry.dtype, entry.shape) for entry in ordered])
    with open(path, "wb") as file:
        file.write(layout.header)
        file.truncate(layout.num_bytes)
