"""What routines of every family share: their indices, and views of their inputs."""

from oracle.routines.common import faults
from oracle.routines.family import RoutineFamily

FAMILY = RoutineFamily(name="common", faults=(faults.FAULTS,))
