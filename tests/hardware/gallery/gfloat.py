"""gfloat: scales, casts and values of the OCP formats in numpy."""

from __future__ import annotations

from oracle.harness.gallery import Project

from ._named import references

PROJECT = Project(
    name="gfloat",
    distributions=("gfloat",),
    carried="its wheel",
    kernels=references("gfloat", "its formula of a scale has no rule for either"),
    devices=("cpu",),
)
