"""vLLM 0.20.2, topk_softmax: experts whose score and bias are together below -1 are never chosen.

Where no router is compiled for the number of experts (160 are none), expert 0 is chosen again and again instead, so
that a token gets one expert several times.
"""

from oracle.harness.finding_scripts import again

case = "topk_softmax/f32/-/t=9,e=160,k=8/bias=1/family=randn/seed=1"
again("torch:ops._moe_C.topk_softmax", case, "wrong experts")
