"""Servers other than vLLM: under which names they ask the quantization config about a model's
modules.
"""
