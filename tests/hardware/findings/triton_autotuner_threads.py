"""Triton 3.6.0, triton.autotune: what a kernel is called with is kept where another thread's call replaces it.

A call raises a TypeError where another thread's call of the kernel ends before its pre_hook, which tensor descriptors
need. Here the dtype of an argument is asked for at that point, and another thread calls the kernel meanwhile.
"""

import sys
from concurrent.futures import ThreadPoolExecutor

import torch
import triton


@triton.autotune([triton.Config({}, num_warps=n, pre_hook=lambda given: None) for n in (1, 2)], key=[])
@triton.jit
def nothing(x):
    pass


class Meanwhile(torch.Tensor):
    dtype = property(lambda self: (other.submit(nothing[(1,)], x).result(), x.dtype)[1])


x, other = torch.zeros(1, device="cuda"), ThreadPoolExecutor(1)
nothing[(1,)](x)
raised = ThreadPoolExecutor(1).submit(nothing[(1,)], x.as_subclass(Meanwhile)).exception()
print(f"a call beside another thread's raised {raised!r}; none is right")
sys.exit(isinstance(raised, TypeError))
