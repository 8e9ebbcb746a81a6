"""What SGLang does with a checkpoint: the modules that it builds, how each dialect reads its
config, and the rules.
"""
