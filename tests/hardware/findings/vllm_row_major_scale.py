"""vLLM 0.20.2, cutlass_scaled_mm with block scales: contiguous scales are read transposed.

Every sum is wrong, by 18 to 21 percent as a whole, when the activation scale is contiguous.
"""

from oracle.bindings.binding import bind
from oracle.harness.finding_scripts import again

again(
    bind(
        "torch:ops._C.cutlass_scaled_mm",
        "cutlass_scaled_mm",
        "(out, a, b.t(), a_scale, b_scale.t(), bias)",
        "(out, a, b, a_scales, b_scales, bias)",
        loads=("vllm._C_stable_libtorch",),
    ),
    "cutlass_scaled_mm/e4m3xe4m3-bf16/1x128:128x128/m=16,n=256,k=512/family=randn/seed=1",
    "outside the bound",
)
