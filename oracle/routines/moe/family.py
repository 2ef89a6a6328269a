"""Mixture-of-experts layers, their routing and their activation."""

from oracle.routines.family import RoutineFamily
from oracle.routines.moe import activation, cases, contract, faults, faults_of_experts, faults_of_inputs, moe_tensor

FAMILY = RoutineFamily(
    name="moe",
    contracts=(activation, contract, moe_tensor),
    grammars=cases.GRAMMARS,
    faults=(faults.faults, faults_of_inputs.faults, faults_of_experts.faults),
    goldens=cases.GOLDENS,
)
