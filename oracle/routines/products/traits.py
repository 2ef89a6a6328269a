"""What a scaled product is, as traits by which its faults apply (:mod:`oracle.routines.traits`).

Most are read off the roles of a contract and the dims of their inputs, so that a product of another distribution has
them without a word. Those that no dim says are stated by the contracts of this family, and by their subclasses.
"""

from __future__ import annotations

from oracle.routines.traits import GROUPED, Stated, Trait, has_role, takes

PRODUCT = has_role("a").called("is a scaled product")
"""Contracts whose inputs are the operands of scaled products."""

# --- stated -------------------------------------------------------------------------------------------------

BY_SHAPE = Trait("reads off their shapes whether scales are of tensors, rows or blocks")
K_IN_GROUPS = Trait("has operands whose K lies in groups")
BY_ENDS = Trait("says where the rows of each group end, and not where they begin")
HEADS = Trait("has a row of a for every token and head")


# --- read off the dims --------------------------------------------------------------------------------------


def dims(contract: Stated, role: str) -> tuple[str, ...]:
    """The dims of the input for a role; none where there is no such input, or where the contract checks its shape."""
    name = contract.roles.get(role)
    return next((spec.dims for spec in contract.inputs if spec.name == name and spec.dims is not None), ())


def _group_of_row(contract: Stated) -> bool:
    """The groups are given by an entry for every row."""
    return any(spec.name == contract.groups and spec.dims == ("M",) for spec in contract.inputs)


_BLOCKS = Trait("has scales of [.., K/128]", lambda c: any(dim.startswith("K/") for dim in dims(c, "a_scale")))
BLOCKS = (PRODUCT & (_BLOCKS | BY_SHAPE | K_IN_GROUPS)).called("has scales of blocks along K")
B_BY_ROW = BLOCKS & Trait(
    "may have one for each row of b", lambda c: any("N" in dim.split("|") for dim in dims(c, "b_scale")[-2:-1])
)
A_BY_BLOCK = BLOCKS & Trait(
    "may have one for 128 rows of a", lambda c: any("M/128" in dim.split("|") for dim in dims(c, "a_scale"))
)
TURNED = Trait("has an operand [..., K, rows]", lambda c: any(dims(c, role)[-2:-1] == ("K",) for role in ("a", "b")))
BIASED = PRODUCT & takes("bias")
SUMMED = PRODUCT & takes("c")
INT4 = PRODUCT & takes("b_group_scales")
DENSE = (PRODUCT - GROUPED).called("is a scaled product without groups")
BATCHED = DENSE & Trait("has a matrix b for each batch or head", lambda c: len(dims(c, "b")) == 3)
IN_GROUPS = (PRODUCT & GROUPED).called("is a scaled product of groups")
BY_INDEX = IN_GROUPS & Trait("has a group number for each row", _group_of_row)
BY_COUNT = IN_GROUPS & Trait("has a matrix a for each group", lambda c: len(dims(c, "a")) == 3)
RUNS = (IN_GROUPS - BY_INDEX - BY_COUNT).called("is a scaled product of runs of rows")
HEAD_GAP = (takes("left") & takes("mid") & takes("right")).called("leaves a gap in the columns of each head")
