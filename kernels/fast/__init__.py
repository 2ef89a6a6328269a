"""Direct calls below a library's public function, one file a library; each says for which releases it was checked.

A file offers one function that gives the direct way for a release in its table, and None for any other: the caller then
takes the public way. ``FP8_KERNELS_FAST_PATHS=0`` takes the public way everywhere.
"""
