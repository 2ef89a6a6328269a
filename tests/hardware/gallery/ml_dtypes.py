"""ml_dtypes: casts and values of its formats in numpy."""

from __future__ import annotations

from oracle.harness.gallery import Project

from ._named import references

PROJECT = Project(
    name="ml_dtypes",
    distributions=("ml_dtypes",),
    carried="its wheel",
    kernels=references("ml_dtypes"),
    devices=("cpu",),
)
