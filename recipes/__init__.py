"""WHAT: schemes, family tables and recipes. Pure Python and data; nothing here imports torch or
transformers.
"""
