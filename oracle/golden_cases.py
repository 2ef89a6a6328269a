"""The cases of a fresh goldens folder, a table and nothing else: small calls that tell neighbours apart.

Not covered: contracts that are not named here, for which :mod:`oracle.golden` chooses from the quick profile.
"""

from __future__ import annotations

_FAMILIES = ("exact", "randn", "codes", "spike", "nan", "ties")
_ROW_SCALED = ("cutlass_w8a8_scaled_mm", "torch_channelwise_w8a8_scaled_mm")
_PER_TENSOR = ("torch_per_tensor_w8a8_scaled_mm", "rocm_per_tensor_w8a8_scaled_mm")


def _small(contract: str, kind: str, families: tuple[str, ...], options: str = "") -> tuple[str, ...]:
    return tuple(f"{contract}/e4m3xe4m3-{kind}/m=5,n=32,k=256/{options}family={f}/seed=7" for f in families)


# Small products of the families that tell accumulators apart, quantisers on ties and specials, layers, layouts; at the
# end some that are kept as digests.
GOLDENS = (
    *_small("fp8_gemm_nt", "bf16/1x128:128x128", _FAMILIES),
    *_small("fp8_blockscale_gemm_sm90", "bf16/1x128:128x128", ("randn", "cancel", "codes")),
    *(f"{c}/bf16xe4m3-bf16/1x128:128x128/m={m},n=64,k=256/family={f}/seed=7"
      for c, m, f in (("flashinfer_fp8_blockscale_gemm", 3, "randn"), ("fp8_blockscale_gemm_sm90", 3, "zeros"),
                      ("dynamic_flashinfer_deepgemm_blockscale_gemm", 3, "outlier"),
                      ("dynamic_flashinfer_deepgemm_blockscale_gemm", 33, "randn"),
                      ("FlashInferFp8DeepGEMMDynamicBlockScaledKernel", 5, "randn"))),
    "fp8_blockscale_gemm_sm90/bf16xbf16-bf16/1x128:128x128/m=3,n=64,k=256/family=randn/seed=7",
    *_small("cutlass_scaled_mm", "bf16/token:channel", _FAMILIES),
    *_small("cutlass_scaled_mm", "f32/token:channel", ("randn", "codes")),
    *_small("cutlass_scaled_mm", "f16/token:channel", ("randn",), "bias=f16/"),
    *_small("cutlass_scaled_mm", "bf16/1x128:128x128", ("randn", "wide"), "bias=bf16/"),
    *(id for c in _ROW_SCALED for id in _small(c, "bf16/token:channel", ("randn", "heavy", "codes"), "bias=bf16/")),
    *(id for c in _PER_TENSOR for id in _small(c, "bf16/tensor:tensor", ("randn", "codes"))),
    *_small("torch_per_token_w8a8_scaled_mm", "bf16/token:channel", ("randn", "codes")),
    *(f"m_grouped_fp8_gemm_nt_contiguous/e4m3xe4m3-bf16/1x128:128x128/m=128,n=8,k=128,g=2/family={f}/seed=7"
      for f in ("randn", "codes")),
    *(f"fp8_m_grouped_gemm_nt_masked/e4m3xe4m3-bf16/1x128:128x128/m=3,n=32,k=256,g=3/family={f}/seed=7"
      for f in ("randn", "codes")),
    *(f"per_token_group_quant_fp8/{d}/1x128/m=6,k=256/{o}family={f}/seed=7"
      for d in ("bf16-e4m3", "f32-e4m3") for o in ("", "ue8m0=1/") for f in ("ties", "amax", "special", "nan")),
    *(f"per_token_cast_to_fp8/bf16-e4m3/1x128/m=6,k=200/{o}family={f}/seed=7"
      for o in ("", "ue8m0=1/") for f in ("amax", "special")),
    *(f"per_block_cast_to_fp8/bf16-e4m3/128x128/m=40,k=130/{o}family={f}/seed=7"
      for o in ("", "ue8m0=1/") for f in ("amax", "special")),
    *(f"per_channel_cast_to_fp8/bf16-e4m3/128x1/m=128,k=12/{o}family={f}/seed=7"
      for o in ("", "ue8m0=1/") for f in ("amax", "randn")),
    *(f"scaled_fp8_quant/f16-e4m3/{s}/m=6,k=256/family={f}/seed=7"
      for s in ("tensor", "token") for f in ("ties", "special")),
    "scaled_fp8_quant/bf16-e4m3/tensor/m=6,k=256/static=1/family=heavy/seed=7",
    *(f"{c}/m=6,k=256/family={f}/seed=7" for f in ("amax", "special", "outlier", "range")
      for c in ("flashinfer_quantize_1x128/bf16-e4m3/1x128", "flashinfer_quantize_128x128/bf16-e4m3/128x128")),
    *(f"per_tensor_dequantize/e4m3-f16/tensor/m=4,k=128/family={f}/seed=7" for f in ("codes", "nan")),
    *(f"ceil_to_ue8m0/f32/-/m=4,k=128/family={f}/seed=7" for f in ("special", "heavy", "nan")),
    "fp8_mqa_logits/e4m3xe4m3-f32/tensor:token/m=3,n=40,h=8,d=64/family=randn/seed=7",
    "fp8_mqa_logits/e4m3xe4m3-f32/tensor:token/m=3,n=40,h=8,d=64/clean=1/family=codes/seed=7",
    "fp8_paged_mqa_logits/e4m3xe4m3-f32/tensor:token/b=2,t=1,n=64,h=8,d=64/family=codes/seed=7",
    "moe_fp8/e4m3xe4m3-bf16/1x128:128x128/t=2,e=2,h=64,i=64,k=1/family=randn/seed=7",
    "moe_fp8/e4m3xe4m3-bf16/tensor:tensor/t=3,e=2,h=64,i=64,k=2/family=codes/seed=7",
    "moe_fp8/bf16xe4m3-bf16/1x128:128x128/t=3,e=2,h=256,i=16,k=2/family=randn/seed=7",
    "moe_fp8/bf16xe4m3-bf16/1x128:128x128/t=3,e=2,h=256,i=16,k=1/"
    "rounding=PRODUCT,limit=7,first=2,on_input=1/family=ties/seed=7",
    "moe_fp8/bf16xe4m3-bf16/tensor:tensor/t=2,e=2,h=64,i=64,k=1/family=amax/seed=7",
    *(f"apply_fi_trtllm_fp8_per_tensor_moe/bf16xe4m3-bf16/tensor:tensor/t=6,g=4,e=2,h=32,i={i}/{o}family=randn/seed=7"
      for i, o in ((32, "weight=f32/"), (24, "weight=bf16/"), (24, "rank=1,logits=bf16,weight=f32/"),
                   (32, "logits=far,weight=f32/"), (32, "logits=ties/"))),
    "apply_fi_trtllm_fp8_per_tensor_moe/bf16xe4m3-bf16/tensor:tensor/t=6,g=2,e=2,h=32,i=32/weight=f32/"
    "family=codes/seed=7",
    *(f"silu_and_mul/{d}/-/m=5,i=24/{o}family={f}/seed=7" for d, o, f in (
        ("bf16", "", "randn"), ("bf16", "each=1/", "ties"), ("bf16", "limit=0.5/", "outlier"), ("f16", "", "special"),
        ("f32", "", "randn"), ("f32", "limit=7,each=1/", "amax"), ("bf16", "", "nan"))),
    *(f"scaled_grouped_mm/e4m3xe4m3-bf16/token:channel/m=9,n=32,k=128,g=4/family={f}/seed=7"
      for f in ("randn", "codes", "ties", "nan")),
    *(f"moe_routing/f32/-/t=24,e=32,k=4/{o}family=randn/seed=7"
      for o in ("", "router=llama4/", "router=softmax/", "router=softmax,renormalize=1/", "groups=4/",
                "groups=4,bias=1,renormalize=1/")),
    *(f"Fp8LinearOp/bf16xe4m3-bf16/{s}/m=4,n=32,k=128/bias=bf16/family=randn/seed=7"
      for s in ("static:tensor", "tensor:tensor", "token:channel")),
    *(f"{c}/e4m3/-/e=3,h=16,i=24/family=codes/seed=7" for c in ("align_fp8_moe_weights_for_fi", "swap_w13_to_w31")),
    "align_fp8_moe_weights_for_fi/e4m3/-/e=2,h=16,i=40/gated=0/family=codes/seed=7",
    *(f"rotate_weights_for_fi_trtllm_fp8_per_tensor_moe/e4m3/-/e=2,h=32,i=32/{o}family=codes/seed=7"
      for o in ("", "gated=0/")),
    *(f"prepare_fp8_moe_layer_for_fi/e4m3/-/e=2,h=32,i=24/{o}family=codes/seed=7"
      for o in ("", "trtllm=1/", "gated=0/")),
    "prepare_fp8_moe_layer_for_fi/e4m3/-/e=1,h=32,i=128/block=1/family=codes/seed=7",
    *(f"calc_diff/{d}/-/m=4,k=128/family=heavy/seed=7" for d in ("f32", "bf16")),
    *(f"requantize_with_max_scale/e4m3/-/s=3,n=48,k=64/family={f}/seed=7" for f in ("codes", "randn")),
    # Too large to keep: these are digests.
    *(f"fp8_gemm_nt/e4m3xe4m3-bf16/1x128:128x128/m=64,n=384,k=1024/family={f}/seed=7" for f in ("codes", "wide")),
    "cutlass_scaled_mm/e4m3xe4m3-bf16/token:channel/m=33,n=256,k=384/family=codes/seed=7",
    "m_grouped_fp8_gemm_nt_contiguous/e4m3xe4m3-bf16/1x128:128x128/m=384,n=192,k=256,g=4/family=randn/seed=7",
    "fp8_m_grouped_gemm_nt_masked/e4m3xe4m3-bf16/1x128:128x128/m=33,n=128,k=640,g=3/family=codes/seed=7",
    "per_token_group_quant_fp8/bf16-e4m3/1x128/m=129,k=640/family=heavy/seed=7",
    "per_block_cast_to_fp8/f32-e4m3/128x128/m=130,k=384/family=special/seed=7",
    "fp8_mqa_logits/e4m3xe4m3-f32/tensor:token/m=64,n=192,h=32,d=64/family=randn/seed=7",
    "Fp8LinearOp/bf16xe4m3-bf16/token:channel/m=33,n=192,k=384/family=outlier/seed=7",
    "moe_fp8/e4m3xe4m3-bf16/1x128:128x128/t=9,e=5,h=256,i=128,k=3/family=randn/seed=7",
    "scaled_grouped_mm/e4m3xe4m3-bf16/token:channel/m=70,n=192,k=256,g=4/family=randn/seed=7",
    "apply_fi_trtllm_fp8_per_tensor_moe/bf16xe4m3-bf16/tensor:tensor/t=17,g=6,e=3,h=160,i=72/weight=f32/"
    "family=randn/seed=7",
)  # fmt: skip
