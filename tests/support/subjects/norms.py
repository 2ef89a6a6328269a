"""RMS norms that return no residual: right where none was given, wrong where one was."""

from __future__ import annotations

from torch import Tensor

from oracle.routines import get
from oracle.routines.base import by_name

NAME = "rms_norm_dynamic_per_token_quant"


def _made(inputs: dict[str, Tensor], epsilon: float) -> dict[str, Tensor]:
    return dict(by_name(get(NAME).reference(inputs, epsilon=epsilon)))


def without_residual(
    x: Tensor, weight: Tensor, residual: Tensor | None = None, scale_ub: Tensor | None = None, epsilon: float = 1e-6
) -> tuple[Tensor, ...]:
    """Codes and scales, and the sum where a residual is given."""
    given = {"x": x, "weight": weight, "residual": residual, "scale_ub": scale_ub}
    made = _made({name: value for name, value in given.items() if value is not None}, epsilon)
    return (made["q"], made["scale"]) if residual is None else (made["q"], made["scale"], made["residual"])


def never_a_residual(
    x: Tensor, weight: Tensor, residual: Tensor | None = None, scale_ub: Tensor | None = None, epsilon: float = 1e-6
) -> tuple[Tensor, ...]:
    """Codes and scales alone."""
    return without_residual(x, weight, residual, scale_ub, epsilon)[:2]
