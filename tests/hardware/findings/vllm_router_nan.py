"""vLLM 0.20.2, topk_softplus_sqrt: a token whose logits are NaN gets expert 0 in every place.

Rows of padding may hold NaN, and a sort of tokens by their experts takes no expert twice; later releases, as
topk_softmax of this one, take 0 for the score of a NaN, which gives different experts.
"""

from oracle.harness.finding_scripts import again

case = "topk_softplus_sqrt/f32/-/t=5,e=8,k=2/logits=nan/family=randn/seed=1"
again("torch:ops._moe_C.topk_softplus_sqrt", case, "wrong experts")
