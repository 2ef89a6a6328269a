"""Triton 3.6.0, triton.autotune: what a kernel is called with is kept where another thread's call replaces it.

A call raises a TypeError where another thread's call of the kernel ends before its pre_hook, which descriptors need.
"""

import sys
from concurrent.futures import ThreadPoolExecutor

import torch
import triton


@triton.autotune([triton.Config({}, num_warps=n, pre_hook=lambda given: None) for n in (1, 2)], key=[])
@triton.jit
def nothing(x): ...


class Meanwhile(torch.Tensor):  # its dtype is asked for between the two, and another thread calls the kernel then
    dtype = property(lambda self: (other.submit(nothing[(1,)], x).result(), x.dtype)[1])


x, one, other = torch.zeros(1, device="cuda"), *(ThreadPoolExecutor(1) for _ in "ab")
raised = [one.submit(nothing[(1,)], y).exception() for y in (x, x.as_subclass(Meanwhile))][1]
print(f"a call beside another thread's raised {raised!r}; none is right")
sys.exit(isinstance(raised, TypeError))
