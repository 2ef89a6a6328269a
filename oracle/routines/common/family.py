"""What routines of every family share: the width of their indices, and experts and groups that a loop leaves out."""

from oracle.routines.common import faults
from oracle.routines.family import RoutineFamily

FAMILY = RoutineFamily(name="common", faults=(faults.FAULTS,))
