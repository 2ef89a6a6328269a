"""fp8-oracle: what an FP8 kernel should have computed, and a verdict on what it did.

    reference(contract, inputs)          the float64 truth, or its correct rounding
    judge(contract, inputs, output)      a verdict on every element, with a proof behind it; true when it is PASSED
    assert_conforms(...)                 the same, with an error unless it is PASSED
    diagnose(contract, inputs, output)   where a failing output fails, and which known faults reproduce it
    interval(contract, inputs)           the least and the greatest admissible value of every element
    compare_close(actual, expected)      what the usual checks say, a row for each; no verdict
    predict(contract, inputs)            the bits that the hardware produces
    identify(contract, inputs, output)   which known arithmetic produced these bits
    classify(contract, inputs, output)   the tightest class of arithmetic that holds an output
    loss(contract, inputs)               what the recipe of a quantiser loses on these values
    gate(contract)                       accepts or rejects outputs, for a tuner or a generator of kernels
    validate(kernel, contract)           a kernel by name, run in a worker process, judged and watched
    contracts()                          every routine that can be asked about, with its inputs and options
    sample(routine, every, to, contract) one call in N of a running engine in a file, to be judged later
    watch(every, budget)                 the calls of a running model by kernel and layer, each judged

Contract and input names are those of the routines that engines call. A verdict and a diagnosis draw themselves
(``verdict.plot()``). This package never imports the production layer ``kernels``: a reference that shares code with its
subject shares its bugs.

A name is loaded when it is first used, so that importing the package (the pytest plugin does, in every project that
has it installed) costs milliseconds and does not load torch.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from oracle.errors import NonconformanceError, OracleError, among

if TYPE_CHECKING:
    from oracle.api import (
        assert_conforms,
        classify,
        contracts,
        gate,
        identify,
        interval,
        judge,
        loss,
        predict,
        reference,
    )
    from oracle.diagnosis.baselines import Closeness, compare_close
    from oracle.diagnosis.explain import diagnose
    from oracle.harness.sampling import sample
    from oracle.harness.validation import validate
    from oracle.harness.watching import watch
    from oracle.routines import cases, data, strategies
    from oracle.verdict.compare import Status, Verdict, Worst
    from oracle.verdict.loss import Loss
    from oracle.verdict.sets import Bounds

__all__ = [
    "Bounds",
    "Closeness",
    "Loss",
    "NonconformanceError",
    "OracleError",
    "Status",
    "Verdict",
    "Worst",
    "assert_conforms",
    "cases",
    "classify",
    "compare_close",
    "contracts",
    "data",
    "diagnose",
    "gate",
    "identify",
    "interval",
    "judge",
    "loss",
    "predict",
    "reference",
    "sample",
    "strategies",
    "validate",
    "watch",
]

_HOME = {
    **dict.fromkeys(
        (
            "assert_conforms",
            "classify",
            "contracts",
            "gate",
            "identify",
            "interval",
            "judge",
            "loss",
            "predict",
            "reference",
        ),
        "oracle.api",
    ),
    **dict.fromkeys(("Closeness", "compare_close"), "oracle.diagnosis.baselines"),
    "Bounds": "oracle.verdict.sets",
    "diagnose": "oracle.diagnosis.explain",
    **dict.fromkeys(("Status", "Verdict", "Worst"), "oracle.verdict.compare"),
    "Loss": "oracle.verdict.loss",
    "sample": "oracle.harness.sampling",
    "validate": "oracle.harness.validation",
    "watch": "oracle.harness.watching",
    **dict.fromkeys(("cases", "data", "strategies"), "oracle.routines"),  # modules: ids of cases, their data, calls
}


if not TYPE_CHECKING:  # a type checker reads the imports above, and refuses every other name

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}; {among(name, __all__)}")
        from oracle.loading import collector_at_rest  # here: what is offered before it is used is public

        with collector_at_rest():
            home = import_module(_HOME[name])
            value = getattr(home, name, None) or import_module(f"{_HOME[name]}.{name}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    """Every public name, loaded or not, and the loaded modules, so that tab completion offers them and no helper."""
    loaded = {name for name, value in globals().items() if name.startswith("__") or isinstance(value, ModuleType)}
    return sorted(loaded | set(__all__))
