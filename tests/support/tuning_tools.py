"""Stand-ins for what the examples of ``docs/how-to/gate.md`` use of Helion and of flashinfer-bench, for a machine that
has neither: names, parameters and what is done with an answer, read in the wheels of Helion 1.5.1 and flashinfer-bench
0.1.2.

``tests/verdict/test_gate_tools.py`` runs each example against these, and against the package where it is installed; it
holds the parameters of both to each other. Not covered: everything else of the packages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

# --- Helion -----------------------------------------------------------------------------------------------------------


@dataclass
class Settings:
    """A tuner's settings: of its own comparison the function that takes its place."""

    autotune_baseline_accuracy_check_fn: Callable[[object, object], None] | None = None
    autotune_ignore_errors: bool = False


class LocalBenchmarkProvider:
    """What times candidates, and compares each with the baseline first."""

    settings: Settings
    mutated_arg_indices: Sequence[int]
    log: Any
    _baseline_output: object

    def _validate_against_baseline(self, config: object, output: object, args: Sequence[object]) -> bool:
        """Whether a candidate is timed at all; an AssertionError of the function is a mismatch."""
        check = self.settings.autotune_baseline_accuracy_check_fn
        assert check is not None, "its own comparison is not stood in for"
        try:
            check(output, self._baseline_output)
        except AssertionError as error:
            if not self.settings.autotune_ignore_errors:
                self.log.warning(str(error))
            return False
        return True


# --- flashinfer-bench -------------------------------------------------------------------------------------------------


class EvaluationStatus(Enum):
    INCORRECT_NUMERICAL = "INCORRECT_NUMERICAL"


@dataclass
class Correctness:
    max_relative_error: float = 0.0
    max_absolute_error: float = 0.0


@dataclass
class Definition:
    """A problem: its axes, inputs and outputs as mappings."""

    name: str
    op_type: str
    reference: str
    axes: dict[str, dict[str, object]]
    inputs: dict[str, dict[str, Any]]
    outputs: dict[str, dict[str, Any]]


class DefaultEvaluator:
    @classmethod
    def can_evaluate(cls, definition: Definition) -> bool:
        return True

    @classmethod
    def check_correctness(
        cls,
        definition: Definition,
        sol_runnable: Any,
        inputs: list[list[Any]],
        ref_outputs: list[list[Tensor]],
        cfg: Any,
        log_path: str,
        device: str,
    ) -> tuple[Correctness | None, Any]:
        raise NotImplementedError("its own comparison is not stood in for")


class Registry(ModuleType):
    """``flashinfer_bench.bench.evaluators.registry``."""

    _EVALUATORS: ClassVar[list[type[DefaultEvaluator]]] = []

    def resolve_evaluator(self, definition: Definition) -> type[DefaultEvaluator]:
        """The one evaluator that takes a definition, else the default one."""
        matches = [one for one in self._EVALUATORS if one.can_evaluate(definition)]
        if len(matches) > 1:
            raise ValueError(f"several evaluators for {definition.name}")
        return matches[0] if matches else DefaultEvaluator


def allocate_outputs(definition: Definition, inputs: list[Any], device: str) -> list[Tensor]:
    """Empty outputs, of the extents that the inputs have and the definition states."""
    extents = {name: axis["value"] for name, axis in definition.axes.items() if axis["type"] == "const"}
    for spec, x in zip(definition.inputs.values(), inputs, strict=True):
        extents |= dict(zip(spec["shape"], x.shape, strict=True))
    return [
        torch.empty([int(extents[axis]) for axis in spec["shape"]], dtype=getattr(torch, spec["dtype"]), device=device)
        for spec in definition.outputs.values()
    ]


def normalize_result(definition: Definition, result: Any, device: str) -> list[Tensor]:
    """What a solution returned as a list."""
    return list(result) if isinstance(result, tuple | list) else [result]


def make_eval(
    status: EvaluationStatus,
    device: str,
    log_path: str | None,
    correctness: Correctness | None = None,
    performance: Any = None,
    extra_msg: str | None = None,
) -> Any:
    """A record with the status."""
    return SimpleNamespace(status=status, correctness=correctness, log=extra_msg or "")


def modules() -> dict[str, ModuleType]:
    """The modules under the names that the examples import."""

    def of(name: str, *parts: Any, **more: Any) -> ModuleType:
        module = ModuleType(name)
        vars(module).update({part.__name__: part for part in parts} | more)
        return module

    top, registry = "flashinfer_bench", Registry("flashinfer_bench.bench.evaluators.registry")
    evaluators = of(f"{top}.bench.evaluators", DefaultEvaluator, registry=registry)
    made = [
        of("helion.autotuner.benchmark_provider", LocalBenchmarkProvider),
        of("helion.runtime.settings", Settings),
        of(top),
        of(f"{top}.bench"),
        evaluators,
        registry,
        of(f"{top}.bench.evaluators.utils", allocate_outputs, normalize_result),
        of(f"{top}.bench.utils", make_eval),
        of(f"{top}.data", Correctness, Definition, EvaluationStatus),
    ]
    return {module.__name__: module for module in (of("helion"), of("helion.autotuner"), of("helion.runtime"), *made)}
