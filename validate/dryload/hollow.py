"""A folder that vLLM can read a checkpoint from, without its data.

In: an opened checkpoint, or one as it would be. Out: its own folder; for one that is not here a
temporary folder with its headers, and holes where the data would be.

Easy to get wrong: vLLM's config classes read more files than config.json.
"""

import contextlib
import json
from collections import defaultdict
from collections.abc import Iterator
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
    if source.folder is not None and not source.changed:
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
            ordered = sorted(entries, key=lambda entry: entry.start)
            layout = lay_out((entry.name, entry.dtype, entry.shape) for entry in ordered)
            with open(within(folder, file), "wb") as written:
                written.write(layout.header)
                written.truncate(layout.num_bytes)
        if set(files) != {SINGLE}:
            weight_map = {entry.name: entry.file for entry in source.entries.values()}
            (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        yield folder
