"""Triton 3.6.0, triton.autotune: what a kernel is called with is kept where another thread's call replaces it.

Threads that call one kernel whose configurations have a pre_hook, as tensor descriptors need, get a TypeError.
"""

import sys
from concurrent.futures import ThreadPoolExecutor

import torch
import triton


@triton.autotune([triton.Config({}, pre_hook=lambda given: None)], key=[])
@triton.jit
def nothing(x):
    pass


x = torch.zeros(1, device="cuda")
nothing[(1,)](x)
sys.setswitchinterval(1e-5)
with ThreadPoolExecutor(4) as pool:
    raised = [f.exception() for f in [pool.submit(lambda: [nothing[(1,)](x) for _ in range(5000)]) for _ in range(4)]]
print(f"{sum(map(bool, raised))} of 4 threads raised: {next(filter(None, raised), None)!r}; none is right")
sys.exit(any(raised))
