"""vLLM 0.20.2, indexer_k_quant_and_cache: float16 keys get the scale of a bit pattern.

Index keys of a float16 model are stored with scales that are wrong by a factor of about 2,000.
"""

from oracle.harness.finding_scripts import again

again(
    "torch:ops._C_cache_ops.indexer_k_quant_and_cache",
    "indexer_k_quant_and_cache/f16-u8/1x128/t=4,d=128,p=64/family=randn/seed=1",
    "vllm_indexer_float16",
)
