"""All that is known of SGLang 0.5.23: its names of modules, what it builds for them, and the
entries that a quantization config needs for it.
"""

VERSION = "0.5.23"
