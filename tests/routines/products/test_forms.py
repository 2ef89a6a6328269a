"""Forms of products: a summand and its one rounding, groups of K, heads with gaps, int4 weights rounded twice."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from torch import Tensor

import oracle
from oracle.bounds import engines
from oracle.bounds import product as definition
from oracle.bounds.accumulator import of_schedule
from oracle.diagnosis import explain
from oracle.errors import InputError, OptionError, ShapeError
from oracle.numbers.formats import decode
from oracle.routines import cases, get
from oracle.routines.catalogue import Call, run
from oracle.routines.catalogue import get as get_fault
from oracle.routines.products import batched_cases, mixed
from oracle.routines.products.roles import each, matrices
from oracle.tensorcore.predict import predict_product
from oracle.tensorcore.schedules import get as get_schedule
from oracle.truth.gemm import ScaledProduct, rational
from oracle.verdict.compare import Status
from tests.support.products import block_scaled
from tests.support.slow_oracle.forms import cute_offset

PROMOTED = get_schedule("sm90.promote128")
K_GROUPED, HEADS = "k_grouped_fp8_gemm_nt_contiguous", "fp8_gemm_nt_skip_head_mid"
FORMS = sorted(name for name in batched_cases.GRAMMARS if get(name).roles)


def summed(seed: int = 0, *, size: float = 1.0) -> ScaledProduct:
    """A product of a few blocks with a summand of about its size."""
    product = block_scaled("randn", 5, 7, 384, seed=seed)
    c = torch.randn(5, 7, generator=torch.Generator().manual_seed(seed)) * size
    return replace(product, c=c)


class TestSummand:
    """``RN(c + F)``: the truth is exact, the bound has one more rounding, the bits are those of one addition."""

    @pytest.mark.parametrize("size", [1.0, 1e6, 1e-6])
    def test_truth_and_bound(self, size: float) -> None:
        """Rationals agree; the predicted bits lie in the interval, in that of the definition as in the compiled one."""
        product, acc = summed(size=size), of_schedule(PROMOTED)
        value = engines.exact(product)
        at = [(m, n) for m in range(5) for n in range(7)]
        off = [abs(float(rational(product, m, n) - Fraction(float(value.hi[m, n])))) for m, n in at]
        assert max(off) <= float((value.lo.abs() + value.slack).max()) * (1 + 2.0**-40)
        bits = decode(predict_product(product, PROMOTED, out_dtype=torch.float32))
        for interval in (engines.exact_and_residue(product, acc)[1], definition.residue_bound(product, acc)):
            assert bool(((value.hi + interval.lo <= bits) & (bits <= value.hi + interval.hi)).all())

    def test_without_its_rounding_the_bound_is_too_narrow(self) -> None:
        """The negative test: the interval of the bare product does not hold the sum with a large summand."""
        product, acc = summed(size=1e6), of_schedule(PROMOTED)
        value, bare = engines.exact(product), engines.residue_bound(replace(product, c=None), acc)
        bits = decode(predict_product(product, PROMOTED, out_dtype=torch.float32))
        assert not bool(((value.hi + bare.lo <= bits) & (bits <= value.hi + bare.hi)).all())

    def test_a_part_keeps_its_summands(self) -> None:
        """Rows and columns take theirs along."""
        product = summed()
        whole = predict_product(product, PROMOTED, out_dtype=torch.float32)
        part = product.rows(1, 4).take_columns(torch.tensor([6, 2]))
        assert torch.equal(predict_product(part, PROMOTED, out_dtype=torch.float32), whole[1:4][:, [6, 2]])
        with pytest.raises(ShapeError, match=r"c has shape \[5, 6\]"):
            replace(product, c=torch.zeros(5, 6))

    @pytest.mark.parametrize(("c", "flushed"), [(2.0**-130, Status.MISTRUSTED), (2.0**-120, Status.FAILED)])
    def test_memory_may_flush_subnormals_and_nothing_else(self, c: float, flushed: Status) -> None:
        case = cases.parse("fp8_gemm_nt_1d1d/e4m3xe4m3-f32/1x128:1x128/m=3,n=8,k=128/c=f32/family=randn/seed=1")
        inputs = case.inputs()
        inputs |= {"a": torch.zeros_like(inputs["a"].float()).to(torch.float8_e4m3fn), "c": torch.full((3, 8), c)}
        judged = get(case.contract).judge(inputs, torch.zeros(3, 8), numerics="sm90.promote128")
        assert judged.status is flushed, judged.summary


class TestLayouts:
    """Operands are rewritten where they lie: as matrices and back."""

    @pytest.mark.parametrize("name", FORMS)
    def test_matrices_are_the_operands(self, name: str) -> None:
        """Rewriting nothing changes nothing, in every role; rewriting something changes that role alone."""
        case = cases.parse(next(iter(batched_cases.GRAMMARS[name].ids(name, "quick"))))
        call = Call(get(name), case.inputs(), case.call_options())
        for role, tensor in get(name).roles.items():
            same = each(role, lambda m: m.clone())(call, dict(call.inputs))
            assert all(
                torch.equal(x.view(torch.uint8), y.view(torch.uint8)) if x.element_size() == 1 else torch.equal(x, y)
                for x, y in zip(same.values(), call.inputs.values(), strict=True)
            )
            found = matrices(call, role, call.inputs[tensor])
            assert all(m.dim() == 2 for m in found)
            assert sum(m.numel() for m in found) == call.inputs[tensor].numel()
            other = each(role, lambda m: (m.to(torch.float32) / 2 + 1).to(m.dtype))(call, dict(call.inputs))
            changed = {key for key in other if other[key] is not call.inputs[key]}
            assert changed == {tensor}


class TestGroupsOfK:
    """What a call of the k-grouped product must say, and a group without steps."""

    def inputs(self) -> dict[str, Tensor]:
        return cases.parse(f"{K_GROUPED}/e4m3xe4m3-f32/1x128:1x128/m=3,n=8,k=256,g=3/family=randn/seed=1").inputs()

    @pytest.mark.parametrize(
        ("ks", "error", "said"),
        [
            ([256, 0, 100], InputError, "multiple of 128"),
            ([256, -128, 256], InputError, "ks holds -128"),
            ([256, 0, 256], ShapeError, "ks sum to 512"),
        ],
    )
    def test_refused(self, ks: list[int], error: type[Exception], said: str) -> None:
        with pytest.raises(error, match=said):
            oracle.reference(K_GROUPED, self.inputs() | {"ks": torch.tensor(ks, dtype=torch.int32)})

    def test_too_few_codes_are_refused(self) -> None:
        inputs = self.inputs()
        with pytest.raises(ShapeError, match="b has 2944 codes; N=8 rows of 384 steps have 3072"):
            oracle.reference(K_GROUPED, inputs | {"b": inputs["b"][:-128]})

    def test_a_group_without_steps_is_its_summand(self) -> None:
        inputs = self.inputs()
        out = oracle.predict(K_GROUPED, inputs, numerics="sm90.promote128")
        assert isinstance(out, Tensor) and torch.equal(out[1], inputs["c"][1])
        assert not torch.equal(out[0], inputs["c"][0])

    def test_a_stale_descriptor_is_named(self) -> None:
        """The race of a public report, by its bits."""
        inputs = self.inputs()
        fault = get_fault("last block of a group of A loaded through the next group's descriptor")
        out = run(Call(get(K_GROUPED), inputs, {}, PROMOTED, torch.float32), fault)
        assert explain.diagnose(K_GROUPED, inputs, out, arch="sm90").names[0] == fault.name


class TestHeads:
    """Columns in heads with a gap: what lies in the gap says nothing."""

    def made(self) -> tuple[dict[str, Tensor], dict[str, object], Tensor]:
        case = cases.parse(f"{HEADS}/e4m3xe4m3-bf16/1x128:128x128/m=3,n=192,k=256/family=randn/seed=1")
        inputs, options = case.inputs(), case.call_options()
        return inputs, options, get(HEADS).predict(inputs, numerics="sm90.promote128", **options)  # type: ignore[return-value]

    def test_the_gap_is_free_and_the_columns_are_not(self) -> None:
        inputs, options, out = self.made()
        for column, status in ((128, Status.PASSED), (191, Status.PASSED), (127, Status.FAILED), (192, Status.FAILED)):
            spoiled = out.nan_to_num(0.0)
            spoiled[1, column] = 1e4
            assert get(HEADS).judge(inputs, spoiled, **options).status is status, column

    def test_heads_that_do_not_fit_are_refused(self) -> None:
        inputs, options, _ = self.made()
        with pytest.raises(OptionError, match="heads of 160; N=192 is no multiple"):
            oracle.reference(HEADS, inputs, **{**options, "left": 96})


class TestInt4:
    """Weights are rounded a second time: to E4M3, after their group's scale."""

    def test_the_second_rounding(self) -> None:
        """1.125 * 7 = 7.875 enters as 8; beyond 448 saturates; the unrounded product is another answer."""
        q = torch.tensor([[7, -8, 3, 0]], dtype=torch.int8)
        scales = torch.tensor([[1.125]]).to(torch.float8_e4m3fn)
        assert decode(mixed.weights(q, scales)).tolist() == [[8.0, -9.0, 3.5, 0.0]]
        large = torch.tensor([[120.0]]).to(torch.float8_e4m3fn)
        assert decode(mixed.weights(q, large)).tolist() == [[448.0, -448.0, 352.0, 0.0]]

    def test_the_table_gives_the_weights(self) -> None:
        """Looked up by the low bits of an encoded nibble, the sign flipped for positive weights, every weight of every
        scale is its second rounding; encoding twice is none."""
        q = torch.arange(-8, 8, dtype=torch.int8)
        nibbles = mixed.encoded((q & 15).view(torch.uint8))
        assert torch.equal(mixed.encoded(nibbles), (q & 15).view(torch.uint8))
        scales = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
        table = decode(mixed.packed(scales)).view(-1, 8)[:, (nibbles & 7).long()]
        found = torch.where(q == 0, 0.0, torch.where(q > 0, -table, table))
        wanted = mixed.weights(q.repeat(len(scales), 1), scales[None])
        assert torch.equal(found, decode(wanted))
        assert not torch.equal(found.roll(1, 1), decode(wanted))

    def test_reordered_weights_are_all_there_once(self) -> None:
        """Place by place, as CuTe's layout of a warp's operand says: nibble by nibble, in as many runs as an index has
        digits, so that every weight's place is read off; tiles follow each other down the rows."""
        n, k = 48, 96
        index, found = torch.arange(n * k), torch.zeros(n * k, dtype=torch.int64)
        for digit in range(5):
            each = (index >> 3 * digit & 7).to(torch.uint8).view(n, k)  # 0..7: encoding is undone after
            made = mixed.nibbles(mixed.reordered(mixed.words(each).t()).t())
            found += mixed.nibbles(mixed.words(mixed.encoded(made))).flatten().long() << 3 * digit
        assert torch.equal(found.sort().values, index)
        threads, values = ((4, 8), (256, 1)), ((4, 2, 2), (64, 8, 1024))
        for place in (0, 1, 5, 8, 17, 63, 64, 511, 512, 1024, 1536, n * k - 1):
            tile, t, v = place // 512, place // 16 % 32, place % 16
            offset = cute_offset(t, threads) + cute_offset(v, values)
            row, column = tile % 3 * 16 + offset % 64, tile // 3 * 32 + offset // 64
            assert int(found[place]) == row * k + column

    @pytest.mark.parametrize(
        "wrong",
        [
            {"b": torch.zeros(4, 8, dtype=torch.int32).t()},
            {"b": torch.zeros(16, 2, dtype=torch.int32).t()},
        ],
    )
    def test_weights_that_fill_no_tile_are_refused(self, wrong: dict[str, torch.Tensor]) -> None:
        with pytest.raises(ShapeError):
            oracle.reference("cutlass_encode_and_reorder_int4b", wrong)

    def test_values_that_are_no_int4_are_refused(self) -> None:
        case = cases.parse("cutlass_w4a8_mm/e4m3xi4-bf16/token:channel/m=3,n=24,k=256/family=randn/seed=1")
        inputs = case.inputs()
        inputs["b_q"][2, 3] = 8
        with pytest.raises(InputError, match="b_q holds 8; an int4 weight is -8..7"):
            oracle.reference(case.contract, inputs)

    def test_a_missing_rounding_is_named(self) -> None:
        case = cases.parse("cutlass_w4a8_mm/e4m3xi4-bf16/token:channel/m=9,n=24,k=256/family=randn/seed=1")
        fault = get_fault("int4 weights times their scale not rounded again")
        call = Call(get(case.contract), case.inputs(), case.call_options(), get_schedule("sm90.chain"))
        found = explain.diagnose(case.contract, call.inputs, run(call, fault), arch="sm90")
        assert fault.name in found.names[:1]
