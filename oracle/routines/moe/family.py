"""Mixture-of-experts layers, their routing and their activation."""

from oracle.routines.family import RoutineFamily
from oracle.routines.layouts import faults as layouts
from oracle.routines.moe import cases, contract, faults, pipeline_cases, pipeline_faults, pipelines, routers
from oracle.routines.products.faults import movement

FAMILY = RoutineFamily(
    name="moe",
    contracts=(contract, pipelines, routers),
    grammars={**cases.GRAMMARS, **pipeline_cases.GRAMMARS},
    # the catalogue names the faults of layouts before those of the layer, and those of runs among them
    faults=(
        layouts.FAULTS,
        faults.ROUTING,
        faults.EXPERTS,
        movement.RUNS,
        faults.ACTIVATION,
        faults.LAYER,
        pipeline_faults.FAULTS,
    ),
    goldens=(*cases.GOLDENS, *pipeline_cases.GOLDENS),
)
