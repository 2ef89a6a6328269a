"""One library per module, imported only when it is used.

Each module ends with its declaration, ``BACKEND`` (:mod:`kernels.backends.declaration`); above it stand plain functions
that run. Backends never import one another.
"""
