# A researcher with the outputs of somebody's hardware: which arithmetic made them, and what it loses.

fp8-oracle list numerics
#> sm90.promote128

cat > record.py <<'EOF'
import oracle
from oracle import cases
from safetensors.torch import save_file

case = cases.parse("fp8_gemm_nt/e4m3xe4m3-f32/1x128:128x128/m=8,n=64,k=512/seed=1")
inputs = case.inputs()
made = {name: oracle.predict("fp8_gemm_nt", inputs, numerics=f"sm90.{name}", out_dtype=case.out_dtype)
        for name in ("promote128", "promote128.muladd")}
blocks = [(inputs["a"][:, k:k + 128].double(), inputs["b"][:, k:k + 128].double()) for k in range(0, 512, 128)]
scales = (inputs["a_scale"][:, i, None] * inputs["b_scale"][:, i].repeat_interleave(64)[:64] for i in range(4))
made["rounded"] = sum((x @ w.T).bfloat16().float() * s for (x, w), s in zip(blocks, scales))
truth = oracle.reference("fp8_gemm_nt", inputs)
for name, out in made.items():
    print(name, f"{(out.double() - truth).abs().max():.1e}")
save_file({**inputs, **{f"out.{name}": out for name, out in made.items()}}, "call.safetensors")
EOF

python record.py
#> promote128 

fp8-oracle judge call.safetensors --contract fp8_gemm_nt --output out.promote128
#> equal the bits of sm90.promote128

fp8-oracle judge call.safetensors --contract fp8_gemm_nt --numerics sm90.promote128 --output out.rounded  #= 1
#> FAILED out.rounded

fp8-oracle identify call.safetensors --contract fp8_gemm_nt --output out.promote128.muladd --top 1
#> 100.0000% of 512 elements  sm90.promote128.muladd

fp8-oracle explain call.safetensors --contract fp8_gemm_nt --output out.rounded --numerics sm90.promote128  #= 1
#> of what is known of sm90: 

fp8-oracle predict call.safetensors --contract fp8_gemm_nt --numerics sm90.promote128.muladd --option out_dtype=float32 --write predicted.safetensors
#> bits of sm90.promote128.muladd

cat > shrink.py <<'EOF'
from hypothesis import HealthCheck, find, settings

import oracle


def forgets_its_second_block(call):
    a, b, a_scale, b_scale = (call.inputs[name] for name in ("a", "b", "a_scale", "b_scale"))
    out = (a[:, :128].float() * a_scale[:, :1]) @ (b[:, :128].float() * b_scale[:, :1].repeat_interleave(128, 0)[:len(b)]).T
    verdict = oracle.judge("fp8_gemm_nt", call.inputs, out.to(call.options["out_dtype"]), arch="cpu", explain="off", **call.options)
    return verdict.status.is_failure


drawn = oracle.strategies.calls("fp8_gemm_nt", families=["exact"], domain="m <= 8, n <= 64")
few = settings(max_examples=30, database=None, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
smallest = find(drawn, forgets_its_second_block, settings=few)
print({name: tuple(x.shape) for name, x in smallest.inputs.items()})
EOF

python shrink.py
#> 'a': (1, 129), 'b': (1, 129)
