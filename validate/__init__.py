"""DOES IT HOLD: what a checkpoint must satisfy before anyone serves it. Needs a checkpoint, no
quantizer.
"""
