"""Faults of scaled products, in the order in which a kernel would make them."""

from collections.abc import Iterator

from oracle.routines.fault import Family, Fault
from oracle.routines.products.faults import arithmetic, forms, movement, scales


class _InOrder:
    """The faults of four files by family; read when they are asked for, since each applies to contracts known then."""

    def __iter__(self) -> Iterator[Fault]:
        faults = [fault for module in (scales, arithmetic, movement, forms) for fault in module.FAULTS]
        for family in Family:
            yield from (fault for fault in faults if fault.family is family)


FAULTS = _InOrder()
