"""A second oracle in integers and fractions: slow, element by element, and with no code of the first.

It imports nothing but the standard library: its own reader of safetensors files, its own decoding and rounding, loops
for layouts, an exponential with proved bounds. :func:`tests.support.slow_oracle.routines.derive` gives the outputs of
a routine.
"""
