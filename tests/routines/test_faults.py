"""The catalogue: complete, sourced, and every fault really changes what it says it changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from oracle.errors import ContractError, NumericsError, OptionError
from oracle.routines import Contract, Kind, RoutineFamily, Sets, TensorSpec, cases, families, get, registered
from oracle.routines import catalogue as module
from oracle.routines.base import Inputs
from oracle.routines.catalogue import BEHAVIOURS, Beyond, Call, Family, agree, catalogue, faults_of, run
from oracle.routines.catalogue import get as get_fault
from oracle.routines.fault import CAST, INDEX, Faults, Stage, Way, always, both, change_of, entry, named, need, way
from oracle.routines.ideas import pairs_swapped, rolled
from oracle.routines.products.traits import PRODUCT
from oracle.routines.quantisers.contract import QuantiserContract
from oracle.tensorcore.predict import predict_product
from oracle.tensorcore.schedules import get as get_schedule

TWINS = (
    "per_token_group_quant_fp8",
    "silu_and_mul_per_block_quant",
    "rms_norm_per_block_quant",
    "reshape_and_cache_flash",
    "concat_and_cache_ds_mla",
    "cp_gather_cache",
    "mxfp8_quantize",
    "nvfp4_quantize_2d",
    "mxfp4_dequantize",
    "deep_gemm_moe",
    "moe_routing",
)
CASE = "fp8_gemm_nt/e4m3xe4m3-bf16/1x128:128x128/m=9,n=192,k=512/family=randn/seed=3"
GEMM = named({"fp8_gemm_nt"})


class Nothing(Contract):
    """A contract without traits, whose input is no view."""

    name, inputs = "nothing", (TensorSpec("anything", Kind.VALUES, (torch.float32,), None, "values", contiguous=True),)

    def reference(self, inputs: Inputs, **options: object) -> torch.Tensor:
        return inputs["anything"]

    def admissible(self, call: Call, numerics: str | None) -> list[Sets]:
        return []


def call(text: str = CASE, schedule: str = "sm90.promote128") -> Call:
    """The call of a case."""
    case = cases.parse(text)
    return Call(get(case.contract), case.inputs(), case.call_options(), get_schedule(schedule), case.out_dtype)


class TestCatalogue:
    """Faults that kernels have really had, each with the thread where it was met."""

    def test_it_is_large_and_sourced(self) -> None:
        """At least 80 faults; every one says where it was met and to what it applies."""
        found = catalogue()
        assert len(found) >= 150
        for fault in found.values():
            assert fault.seen and fault.contracts and fault.changes, fault.name

    def test_every_family_is_there(self) -> None:
        """All families but behaviour have mutations; behaviour names its watches."""
        assert {fault.family for fault in catalogue().values()} == set(Family) - {Family.BEHAVIOUR}
        assert len(BEHAVIOURS) >= 10 and all(b.watch and b.seen for b in BEHAVIOURS)

    def test_contracts_exist(self) -> None:
        """No fault applies to a routine that nobody judges."""
        for fault in catalogue().values():
            for contract in fault.contracts:
                get(contract)

    @pytest.mark.parametrize("contract", sorted(name for name, one in registered().items() if PRODUCT.holds(one)))
    def test_every_product_has_many(self, contract: str) -> None:
        """Each product routine has mutants of every family."""
        assert len(faults_of(contract)) >= 60

    def test_an_unknown_name_is_answered_with_near_ones(self) -> None:
        """The error lists faults that share a word."""
        with pytest.raises(OptionError, match="B scale of the previous N block"):
            get_fault("scale of the previous block")

    @pytest.mark.parametrize("name", [n for n, one in registered().items() if isinstance(one, QuantiserContract)])
    def test_every_quantiser_has_many(self, name: str) -> None:
        """Each has mutants of its amax, its scale, its cast and its codes."""
        found = faults_of(name)
        assert {INDEX, Family.SCALE_VALUE, CAST, Family.MOVEMENT} <= {fault.family for fault in found}
        assert len(found) >= 13

    @pytest.mark.parametrize("name", TWINS)
    def test_a_subclass_of_another_distribution_has_the_faults_of_its_base(self, name: str) -> None:
        """Whatever its name is; and a contract that derives from nothing has none of them."""
        twin = get(name)
        outside = type("Outside", (type(twin),), {"name": "a routine of another distribution"})
        theirs = object.__new__(outside)
        assert [f.name for f in catalogue().values() if f.on.holds(theirs)] == [f.name for f in faults_of(name)]
        assert not any(fault.on.holds(Nothing()) for fault in faults_of(name))

    @staticmethod
    def again(*names: str) -> Faults:
        """Declarations of names that the catalogue has."""
        found = Faults(GEMM)
        for name in names:
            found.declare(name, CAST, seen="this test", store=lambda acc: torch.zeros_like(acc).to(torch.bfloat16))
        return found

    @pytest.mark.turns(4)
    def test_a_name_of_ours_in_another_family_is_listed_with_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Both faults are there, each with its own change, and are found by their names."""
        theirs = RoutineFamily("again", faults=(self.again("store truncates", "a name of its own"),))
        monkeypatch.setattr(module, "families", lambda: (*families(), theirs))
        found = catalogue.__wrapped__()
        assert set(found) - set(catalogue()) == {"store truncates (again)", "a name of its own"}
        assert found["store truncates"] is catalogue()["store truncates"]
        monkeypatch.setattr(module, "catalogue", lambda: found)
        monkeypatch.setattr(module, "_applying", module._applying.__wrapped__)
        mine, other = (run(call(), get_fault(name)) for name in ("store truncates", "store truncates (again)"))
        assert isinstance(mine, torch.Tensor) and isinstance(other, torch.Tensor)
        assert other.count_nonzero() == 0 < mine.count_nonzero()
        assert {"store truncates", "store truncates (again)"} <= {fault.name for fault in faults_of("fp8_gemm_nt")}

    def test_a_name_twice_in_a_family_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """In two tables of one family, of this project or of another; and a name that is made of another's."""
        for owner, name, *tables in (
            ("again", "a name of its own", self.again("a name of its own"), self.again("a name of its own")),
            ("products", "store truncates", self.again("store truncates")),
            ("again", "store truncates", self.again("store truncates (again)", "store truncates")),
        ):
            family = RoutineFamily(str(owner), faults=tuple(t for t in tables if isinstance(t, Faults)))
            monkeypatch.setattr(module, "families", lambda family=family: (*families(), family))
            with pytest.raises(OptionError, match=f"'{name}' of family '{family.name}' stands twice in the catalogue"):
                catalogue.__wrapped__()


class TestDeclare:
    """``Faults.declare``: a line with its changes as keywords, or a decorator of one change."""

    def test_a_line_and_a_decorated_stage_are_the_same_fault(self) -> None:
        """The stage is the keyword, the function's name, or the first word of it."""
        made = []
        for how in ("keyword", "name", "first word"):
            found = Faults(GEMM)
            if how == "keyword":
                found.declare("doubled", INDEX, seen="this test", write=lambda out: out * 2)
            elif how == "name":

                @found.declare("doubled", INDEX, seen="this test")
                def write(call: Call, out: torch.Tensor) -> torch.Tensor:
                    return out * 2
            else:

                @found.declare("doubled", INDEX, seen="this test")
                def write_twice_as_much(out: torch.Tensor) -> torch.Tensor:
                    return out * 2

                assert write_twice_as_much(torch.ones(1)) == 2, "the decorated function stays what it is"
            (fault,) = found
            assert set(fault.changes) == {Stage.WRITE} and fault.contracts == {"fp8_gemm_nt"}
            made.append(run(call(), fault))
        right = run(call())
        assert isinstance(right, torch.Tensor)
        for one in made:
            assert isinstance(one, torch.Tensor) and torch.equal(one, right * 2)

    def test_a_declaration_keeps_what_it_says(self) -> None:
        """Family, source, needs, arguments, contracts and order."""
        found = Faults(GEMM)
        for word in ("first", "second"):
            found.declare(
                word,
                CAST,
                seen="here",
                read=entry("a_scale", lambda s: s),
                store=lambda acc: acc,
                needs=need(lambda call: False, "never"),
                same_if="equal",
                admissible_if="close",
                on=named({"cutlass_scaled_mm"}),
                race=True,
            )
        first, second = found
        assert (first.name, second.name) == ("first", "second")
        assert (first.family, first.seen, first.same_if, first.admissible_if) == (CAST, "here", "equal", "close")
        assert first.race and first.contracts == {"cutlass_scaled_mm"} and first.needs(call()) == "never"
        assert set(first.changes) == {Stage.READ, Stage.STORE}

    def test_ways_of_one_idea_are_one_declaration(self) -> None:
        """A fault for each way, in order: its words in the name, its change in the stage, its own arguments first."""
        found, asked = Faults(GEMM), need(lambda call: call.rows > 1, "one row")
        found.declare(
            "scale of the {} row",
            INDEX,
            seen="here",
            needs=asked,
            over=(
                way("previous", 1),
                way("next", -1, seen="there", family=CAST),
                way("same", 0, same_if="it is its own").but(needs=always, store=lambda acc: acc),
            ),
            read=lambda steps: entry("a_scale", rolled(steps)),
        )
        previous, following, same = found
        assert [one.name for one in found] == [f"scale of the {word} row" for word in ("previous", "next", "same")]
        assert [(one.family, one.seen) for one in found] == [(INDEX, "here"), (CAST, "there"), (INDEX, "here")]
        assert (previous.needs, following.needs, same.needs) == (asked, asked, always)
        assert set(same.changes) == {Stage.READ, Stage.STORE} and (previous.same_if, same.same_if) == (
            "",
            "it is its own",
        )
        scale = torch.arange(3.0)[:, None]
        moved = [one.changes[Stage.READ](call(), {"a_scale": scale})["a_scale"].flatten().tolist() for one in found]
        assert moved == [[2.0, 0.0, 1.0], [1.0, 2.0, 0.0], [0.0, 1.0, 2.0]]

    @pytest.mark.parametrize(
        ("ways", "message"),
        [
            ((way("a", 1), way("a", -1)), "'a row' is declared twice"),
            ((way("a", 1), way("b", 1, same_iff="typed wrongly")), "'b row' changes 'same_iff', which is no stage"),
            ((way("a", 1, seen=""),), "'a row' needs a source"),
        ],
    )
    def test_a_way_that_cannot_be_right_is_refused(self, ways: tuple[Way, ...], message: str) -> None:
        """By the name of its fault."""
        with pytest.raises(OptionError, match=message):
            Faults(GEMM).declare("{} row", INDEX, seen="here", over=ways, read=lambda steps: rolled(steps))

    def test_a_declaration_over_ways_decorates_nothing(self) -> None:
        """Its changes are keywords."""
        declared = Faults(GEMM).declare("{}", INDEX, seen="here", over=(way("a", 1),), read=rolled)
        with pytest.raises(OptionError, match="decorates no function; give rolled by a keyword"):
            declared(rolled)

    def test_needs_give_the_first_reason(self) -> None:
        """``both`` asks in order; a reason may depend on the call."""
        one = call()
        fits, rows = need(lambda c: True, "unused"), need(lambda c: c.rows > 9, lambda c: f"{c.rows} rows")
        assert both(fits)(one) is None
        assert both(fits, rows, need(lambda c: False, "later"))(one) == "9 rows"

    @pytest.mark.parametrize(
        ("words", "error", "message"),
        [
            ({"seen": ""}, OptionError, "'x' needs a source: where it was met"),
            ({"name": ""}, OptionError, "needs a name"),
            ({"name": "taken"}, OptionError, "'taken' is declared twice"),
            ({"stores": lambda acc: acc}, OptionError, "'x' changes 'stores', which is no stage; stages are: read, "),
            ({"store": lambda: None}, OptionError, "takes 0 arguments; a change takes .call, value. or .value."),
            ({"store": lambda call, acc, more: acc}, OptionError, "takes 3 arguments"),
            ({"store": torch.zeros_like}, OptionError, "does not say what it takes; write a lambda around it"),
        ],
    )
    def test_what_cannot_be_right_is_refused(
        self, words: dict[str, object], error: type[Exception], message: str
    ) -> None:
        """Each with a typed error that names the fault, where it is declared."""
        found = Faults(GEMM)
        found.declare("taken", CAST, seen="this test", store=lambda acc: acc)
        given: dict[str, object] = {"name": "x", "family": CAST, "seen": "this test", **words}
        if not {"store", "stores"} & set(words):
            given["store"] = lambda acc: acc
        with pytest.raises(error, match=message):
            found.declare(**given)  # type: ignore[arg-type]
        assert [fault.name for fault in found] == ["taken"], "a refused fault leaves nothing behind"

    def test_an_unknown_contract_is_refused_when_the_faults_are_read(self) -> None:
        """The error names the fault and the trait that no registered contract has."""
        found = Faults(GEMM)
        found.declare("x", CAST, seen="this test", on=named({"fp8_gemm_xx"}), store=lambda acc: acc)
        with pytest.raises(ContractError, match="'x' applies to no registered contract: .*fp8_gemm_xx"):
            list(found)

    def test_a_function_named_for_no_stage_is_refused(self) -> None:
        """Its first word must be a stage."""
        found = Faults(GEMM)
        with pytest.raises(OptionError, match="'x' changes 'truncated', which is no stage"):

            @found.declare("x", CAST, seen="this test")
            def truncated_store(acc: torch.Tensor) -> torch.Tensor:
                return acc

    def test_a_decorator_on_a_line_that_has_its_change_is_refused(self) -> None:
        """A fault has its changes from one place."""
        found = Faults(GEMM)
        with pytest.raises(OptionError, match="'x' has its changes already: store"):
            found.declare("x", CAST, seen="this test", store=lambda acc: acc)(change_of)

    def test_a_declaration_without_a_change_is_refused_when_it_is_read(self) -> None:
        """Neither a stage nor a decorated function."""
        found = Faults(GEMM)
        found.declare("x", CAST, seen="this test")
        with pytest.raises(OptionError, match="'x' changes nothing: name a stage, or decorate a function with it"):
            list(found)


class TestRun:
    """A right kernel with a fault in it."""

    def test_without_a_fault_it_is_the_right_kernel(self) -> None:
        """The bits of the schedule."""
        right = call()
        product = right.parts[0].product
        assert torch.equal(run(right), predict_product(product, "sm90.promote128", out_dtype=torch.bfloat16))

    @pytest.mark.parametrize("fault", faults_of("fp8_gemm_nt"), ids=lambda f: f.name)
    def test_a_fault_that_applies_changes_the_inputs_never(self, fault: object) -> None:
        """A mutant leaves its call as it was."""
        one = call()
        before = {name: t.clone() for name, t in one.inputs.items()}
        if fault.applies(one) is None:  # type: ignore[attr-defined]
            run(one, fault)  # type: ignore[arg-type]
        assert all(torch.equal(before[n].view(torch.uint8), t.view(torch.uint8)) for n, t in one.inputs.items())

    def test_row_major_as_column_major_is_a_permutation_of_memory(self) -> None:
        """Element (m, b) is read at b * align(M, 4) + m of the row-major buffer."""
        case = cases.parse(CASE.replace("m=9", "m=8"))
        inputs = case.inputs()
        one = Call(get(case.contract), inputs, {}, get_schedule("sm90.promote128"))
        scale = inputs["a_scale"]
        read = torch.stack([scale.flatten()[torch.arange(4) * 8 + m] for m in range(8)])
        wanted = run(Call(one.contract, inputs | {"a_scale": read}, {}, one.schedule))
        assert torch.equal(run(one, get_fault("row-major A scale read as [K/128, align(M, 4)]")), wanted)

    def test_beyond_a_buffer_nothing_is_claimed(self) -> None:
        """With UNKNOWN, rows that read past the end are NaN; the others are numbers."""
        one = replace(call(CASE.replace("m=9", "m=42")), beyond=Beyond.UNKNOWN)
        out = run(one, get_fault("unpadded A scale read with leading dimension align(M, 4)"))
        assert isinstance(out, torch.Tensor)
        assert bool(torch.isnan(out).any()) and not bool(torch.isnan(out).all())

    def test_an_accumulator_not_cleared(self) -> None:
        """Before the middle K block: the block before it counts again, by the middle one's scales; by its own scales
        the sum is another."""
        one = replace(call(), schedule=None)
        out = run(one, get_fault("accumulator not cleared before the middle K block"))
        a, b, sa, sb = (one.inputs[name].double() for name in ("a", "b", "a_scale", "b_scale"))
        cut, each = [slice(128 * k, 128 * k + 128) for k in range(4)], sb.repeat_interleave(128, dim=0)[:192]
        raw = [a[:, at] @ b[:, at].T for at in cut]
        right = sum(x * sa[:, k, None] * each[:, k] for k, x in enumerate(raw))
        assert isinstance(out, torch.Tensor) and isinstance(right, torch.Tensor)
        for block, near in ((2, True), (1, False)):
            wanted = right + raw[1] * sa[:, block, None] * each[:, block]
            same = agree(out, wanted.float().to(torch.bfloat16))
            assert bool(same.to(torch.float32).mean() > 0.99) is near  # one addition is rounded twice

    def test_faults_compose(self) -> None:
        """Two faults at once differ from either alone and from the right kernel."""
        one = call()
        first, second = get_fault("store truncates"), get_fault("A scale of the next K block")
        outputs = [run(one), run(one, first), run(one, second), run(one, first, second)]
        for i, x in enumerate(outputs):
            for y in outputs[i + 1 :]:
                assert isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor)
                assert not bool(agree(x, y).all())

    def test_a_fault_that_does_not_apply_is_refused_with_its_reason(self) -> None:
        """The message says why."""
        with pytest.raises(NumericsError, match="there is no bias"):
            run(
                call("cutlass_scaled_mm/e4m3xe4m3-bf16/token:channel/m=3,n=64,k=128/family=randn/seed=1", "sm90.chain"),
                get_fault("bias ignored"),
            )
        with pytest.raises(NumericsError, match="not a fault of"):
            run(call(), get_fault("relu left out"))


@pytest.mark.parametrize(("n", "due"), [(4, [1, 0, 3, 2]), (5, [1, 0, 3, 2, 4]), (1, [0])])
def test_neighbours_are_exchanged(n: int, due: list[int]) -> None:
    """The last of an odd number has no neighbour: the kernels of one column have such outputs."""
    x = torch.arange(2 * n, dtype=torch.float32).reshape(2, n)
    assert torch.equal(pairs_swapped(x), x[:, due])
