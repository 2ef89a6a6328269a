"""Mixture-of-experts layers, their routing and their activation."""

from oracle.routines.family import RoutineFamily
from oracle.routines.layouts import faults as layouts
from oracle.routines.moe import (
    activation_cases,
    activation_faults,
    activations,
    block_layer_cases,
    block_layer_faults,
    block_layers,
    cases,
    contract,
    faults,
    hashed,
    model_routers,
    pipeline_cases,
    pipeline_faults,
    pipelines,
    routers,
    sum_cases,
    sum_faults,
    sums,
)
from oracle.routines.products.faults import movement

FAMILY = RoutineFamily(
    name="moe",
    contracts=(contract, activations, pipelines, block_layers, routers, model_routers, sums, hashed),
    grammars={
        **hashed.GRAMMARS,
        **cases.GRAMMARS,
        **activation_cases.GRAMMARS,
        **pipeline_cases.GRAMMARS,
        **block_layer_cases.GRAMMARS,
        **sum_cases.GRAMMARS,
    },
    # the catalogue names the faults of layouts before those of the layer, and those of runs among them
    faults=(
        layouts.FAULTS,
        faults.ROUTING,
        faults.MODEL,
        faults.EXPERTS,
        movement.RUNS,
        activation_faults.FAULTS,
        faults.LAYER,
        pipeline_faults.FAULTS,
        block_layer_faults.FAULTS,
        sum_faults.FAULTS,
        hashed.FAULTS,
    ),
)
