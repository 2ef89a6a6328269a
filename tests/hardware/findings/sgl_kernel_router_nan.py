"""sglang-kernel 0.4.4, topk_softmax: a token whose logits are NaN gets expert 0 in every place.

Rows of padding may hold NaN, and a sort of tokens by their experts takes no expert twice.
"""

from oracle.harness.finding_scripts import again

case = "topk_softmax/f32/-/t=5,e=8,k=2/logits=nan/family=randn/seed=1"
again("torch:ops.sgl_kernel.topk_softmax", case, "wrong experts")
