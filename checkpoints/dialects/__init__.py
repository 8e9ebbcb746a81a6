"""Each way of writing a quantization config: what a server builds by it, how it is written, and
what excepts a module.
"""
