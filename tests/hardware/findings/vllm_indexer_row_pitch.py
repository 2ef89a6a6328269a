"""vLLM 0.20.2, indexer_k_quant_and_cache: rows of a slice are read as if they were packed.

Every key but the first is quantised from other numbers when the keys are a slice of a wider tensor.
"""

from oracle.harness.finding_scripts import again

again(
    "torch:ops._C_cache_ops.indexer_k_quant_and_cache",
    "indexer_k_quant_and_cache/bf16-u8/1x128/t=4,d=128,p=64/k:pitch/family=randn/seed=1",
    "inadmissible",
)
