"""fp8-oracle: what an FP8 kernel should have computed, and a verdict on what it did.

    reference(contract, inputs)          the float64 truth, or its correct rounding
    judge(contract, inputs, output)      a verdict on every element, with a proof behind it
    predict(contract, inputs)            the bits that the hardware produces
    identify(contract, inputs, output)   which known arithmetic produced these bits

Contract and input names are those of the routines that engines call (``contracts()`` lists them). This package never
imports the production layer ``kernels``: a reference that shares code with its subject shares its bugs.
"""

from oracle.api import contracts, judge, predict, reference
from oracle.compare import Status, Verdict, Worst
from oracle.errors import OracleError

__all__ = ["OracleError", "Status", "Verdict", "Worst", "contracts", "judge", "predict", "reference"]
