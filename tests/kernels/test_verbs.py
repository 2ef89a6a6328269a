"""What follows from the declaration of a verb."""

import inspect

import pytest
import torch
from torch import Tensor

import kernels
from kernels import adapters, operators
from kernels.errors import OptionError
from kernels.verbs import PUBLIC, SERVED, VERBS


def pairs(
    a: tuple[Tensor, Tensor], sizes: tuple[int, int], *, c: Tensor | None = None
) -> tuple[Tensor, Tensor | None, int]:
    """A function with everything that an operator cannot take."""
    return a[0] * a[1], c, sum(sizes)


class TestFlat:
    """An operator's arguments are those of the verb, flat; a result of None is an empty tensor."""

    def test_pairs_integers_and_names(self) -> None:
        flat = operators.flat(pairs)
        assert list(inspect.signature(flat).parameters) == ["a", "a_scale", "sizes", "c"]
        assert (
            flat.__annotations__["sizes"] == list[int] and flat.__annotations__["return"] == tuple[Tensor, Tensor, int]
        )
        two, three = torch.tensor([2.0]), torch.tensor([3.0])
        product, c, size = flat(two, three, [4, 5], None)
        assert product.item() == 6 and c.numel() == 0 and size == 9
        assert flat(two, three, [4, 5], two)[1] is two

    def test_what_an_operator_can_take_stays_as_it_is(self) -> None:
        """The twin."""

        def plain(x: Tensor, group: int = 128) -> tuple[Tensor, Tensor]:
            return x, x[:group]

        assert operators.flat(plain) is plain


class TestDeclared:
    """One declaration: the name, the contract, the operator."""

    def test_public_names(self) -> None:
        assert sorted(["NAMESPACE", *PUBLIC]) == kernels.__all__ and len(set(PUBLIC)) == len(PUBLIC)
        assert all(getattr(kernels, name) is verb.function for name, verb in VERBS.items())

    def test_operators(self) -> None:
        """A verb has one where it declares a fake or what it writes into, and none otherwise."""
        assert VERBS["fp8_gemm_nt"].writes == ("out",) and VERBS["silu_and_mul_quant"].writes == ()
        assert VERBS["fp8_gemm_nn"].writes is None and not hasattr(torch.ops.fp8_kernels, "fp8_gemm_nn")

    def test_what_a_contract_writes_is_a_copy(self) -> None:
        """An input that a verb writes into keeps its bits."""
        served, pages = SERVED["concat_and_cache_mla"], torch.zeros(2, 4, 48).to(torch.float8_e4m3fn)
        inputs = {
            "kv_c": torch.ones(1, 32).bfloat16(),
            "k_pe": torch.ones(1, 16).bfloat16(),
            "kv_cache": pages,
            "slot_mapping": torch.tensor([0]),
            "scale": torch.ones(1),
        }
        made = served(inputs, {})
        assert isinstance(made, dict) and bool((made["kv_cache"][0, 0].float() == 1).all())
        assert not bool(pages.float().any())


class TestAdapters:
    """From names to arguments."""

    def test_by_name(self) -> None:
        run = adapters.by_name("q", "z", renamed={"x": "w"}, defaults={"n": 2}, converted={"k": Tensor.tolist})
        x, k = torch.ones(1), torch.tensor([3])
        made = run(lambda w, k, n: (w * n * k[0], None), {"x": x, "k": k}, {})
        assert isinstance(made, dict) and set(made) == {"q"} and made["q"].item() == 6

    def test_a_number_of_outputs_that_is_not_declared(self) -> None:
        with pytest.raises(ValueError, match="zip"):
            adapters.by_name("q", "scale")(lambda x: (x,), {"x": torch.ones(1)}, {})

    def test_no_dtype(self) -> None:
        with pytest.raises(OptionError, match="out_dtype"):
            adapters.out_dtype_of({"out_dtype": "bfloat16"})
