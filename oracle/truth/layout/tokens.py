"""Integers of padding: aligned extents, padded row counts, tile sizes.

    ceil_div(x, y) = ceil(x / y)        align(x, y) = y ceil(x / y)
    tile           = clamp(next power of two >= floor(1.3 floor(T top_k / E)), 8, 64)

Sources: DeepGEMM deep_gemm/utils/math.py; vLLM w8a8_utils (17 rows), flashinfer_utils (tile size).
Not covered: what is in a padded row; it is unspecified and must not influence a real one.
"""

from __future__ import annotations

from oracle.errors import OptionError

OUTPUT_PADDING = 17
"""Rows that ``Fp8LinearOp`` gives ``torch._scaled_mm`` at least: it is faster above 16 rows."""
TMA_BYTES = 16
SMALLEST_TILE, LARGEST_TILE = 8, 64


def ceil_div(x: int, y: int) -> int:
    """``ceil(x / y)`` for ``x >= 0`` and ``y > 0``.

    Raises
    ------
    OptionError
        An argument is outside that range.
    """
    if x < 0 or y <= 0:
        raise OptionError(f"ceil_div({x}, {y}): takes x >= 0 and y > 0")
    whole, rest = divmod(x, y)
    return whole + (rest > 0)


def align(x: int, y: int) -> int:
    """The smallest multiple of ``y`` that is not below ``x``; arguments as :func:`ceil_div`."""
    return y * ceil_div(x, y)


def tma_aligned(mn: int, element_size: int) -> int:
    """Leading stride, in elements, of a matrix whose columns start at multiples of 16 bytes.

    Raises
    ------
    OptionError
        16 is no multiple of ``element_size``.
    """
    if element_size <= 0 or TMA_BYTES % element_size:
        raise OptionError(f"element_size={element_size} does not divide {TMA_BYTES} bytes")
    return align(mn, TMA_BYTES // element_size)


def padded_rows(rows: int, padding: int | None) -> int:
    """Rows of a quantised activation: at least ``padding`` of them (``num_token_padding``), None for no padding."""
    if padding is None:
        return rows
    if padding <= 0:
        raise OptionError(f"num_token_padding={padding}: pass a positive number of rows, or None")
    return max(rows, padding)


def calculate_tile_tokens_dim(num_tokens: int, top_k: int, num_experts: int) -> int:
    """Tokens of one tile of the TensorRT-LLM MoE kernel, with 30 % of imbalance allowed for.

    Raises
    ------
    OptionError
        A count is negative, or there is no expert.
    """
    if num_tokens < 0 or top_k < 0 or num_experts <= 0:
        raise OptionError(f"num_tokens={num_tokens}, top_k={top_k}, num_experts={num_experts}: counts, experts > 0")
    expected = num_tokens * top_k // num_experts
    # floor(1.3 n): the float64 nearest to 1.3 is above it, so the float product has the same floor below 2**49.
    needed = 13 * expected // 10
    tile = SMALLEST_TILE
    while tile < needed and tile < LARGEST_TILE:
        tile *= 2
    return tile
