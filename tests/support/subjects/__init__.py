"""Example kernels: right ones, and ones that are broken in one way each."""
