"""Contracts of SageAttention's quantisers: INT8 codes of queries and keys by blocks of rows, E4M3 codes of values by
channel.

    y     x, or fl(x - mean) for keys that are smoothed, or fl(x sm_scale)
    s     max(|y| of a block of rows of one head, 1e-7) / 127
    q     sat(rne(fl(y fl(127 / amax))))
    v     sat(rne(fl(v fl(scale_max / amax)))) as E4M3, amax of one column of a KV head over all keys

The library is compiled with ``--use_fast_math``: both divisions may be approximate, and one by a constant a product
with its rounded reciprocal (:mod:`oracle.numbers.fast_math`). Scales and codes of either are right.

A block with NaN or infinity is left open.
Source: SageAttention 2.2 ``csrc/fused/fused.cu`` and ``sageattention/quant.py``, read, not run. Not covered: the layout
HND, scales for each thread, ``smooth_v``, whose sum has any order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from oracle.errors import InputError, OptionError
from oracle.numbers import fast_math
from oracle.numbers.formats import decode
from oracle.numbers.rounding import f32
from oracle.routines.attention.sage import slots
from oracle.routines.base import E4M3, F32, Call, Contract, Inputs, Options, OptionSpec, Out, TensorSpec, register
from oracle.routines.fault import Fault, Stage, fold
from oracle.routines.int8.contract import INT8, Int8Quantiser, Quantised, Steps
from oracle.routines.traits import Kind
from oracle.truth.int8 import integers, saturated
from oracle.verdict.compare import Admissible
from oracle.verdict.sets import Elements, Sets, rounded_to

HALVES = (torch.float16, torch.bfloat16)
FLOOR = 1e-7
PADDED = 64
"""Codes of values are stored for a multiple of so many keys."""
LEAST, MOST = 2.0**-100, 2.0**120
"""Outside of them a scale or its inverse may be flushed or infinite."""


class BlockQuantiser(Int8Quantiser):
    """``x`` is ``[B, S, H, D]``; a block has rows of one head, the last one fewer."""

    returns: ClassVar[tuple[str, ...]] = ("q", "scale")
    shapes: ClassVar[Mapping[str, str]] = {"scale": "[B, H, blocks]"}
    x = TensorSpec("x", Kind.VALUES, HALVES, ("B", "S", "H", "D"), "values to quantise")

    def steps(self, options: Options) -> Steps:
        return Steps(floor=FLOOR)

    def rows(self, options: Options) -> tuple[int, int]:
        """How many rows share a scale, and to a multiple of how many the rows are padded for them."""
        size = int(str(options["block_size"]))
        return size, size

    def smoothed(self, inputs: Inputs, options: Options) -> Tensor:
        """What is quantised, float64 values of float32 ``[B, S, H, D]``; NaN stays NaN."""
        return decode(inputs["x"])

    def outputs(self, call: Call) -> dict[str, Out]:
        shape, blocks = tuple(call.inputs["x"].shape), self._blocks(call.inputs, call.resolved)
        return {"q": Out(shape, INT8), "scale": Out((shape[0], shape[2], blocks), F32)}

    def _blocks(self, inputs: Inputs, options: Options) -> int:
        rows, whole = self.rows(options)
        return -(-inputs["x"].shape[1] // whole) * (whole // rows)

    def computed(self, inputs: Inputs, options: Options, steps: Steps) -> Quantised:
        y, (rows, _) = self.smoothed(inputs, options), self.rows(options)
        (batch, queries, heads, depth), blocks = y.shape, self._blocks(inputs, options)
        short = (0, 0, 0, 0, 0, blocks * rows - queries)
        groups = torch.nn.functional.pad(y, short).transpose(1, 2).reshape(batch, heads, blocks, rows * depth)
        unknown = (~torch.isfinite(groups)).any(dim=3, keepdim=True)
        known = groups.masked_fill(unknown, 0.0)
        amax = known.abs().amax(dim=3, keepdim=True)
        amax = amax.clamp(min=float(f32(torch.tensor(steps.floor, dtype=torch.float64, device="cpu"))))
        top = torch.full_like(amax, steps.top)
        inverses = (f32(top / amax), fast_math.divide(top, amax, flushed=True))
        codes = [saturated(integers(f32(known * by), steps.rule)) for by in inverses]
        result = self.between(codes, 0, unknown.expand(groups.shape))
        scales = (f32(amax / steps.top), f32(amax * f32(1.0 / top)))

        def back(x: Tensor) -> Tensor:
            whole = x.reshape(batch, heads, blocks * rows, depth)
            return whole[:, :, :queries].transpose(1, 2).contiguous()

        low, high, expected, opened = (back(x) for x in (result.low, result.high, result.expected, result.open))
        scale, other = (x.squeeze(3) for x in scales)
        return Quantised(low, high, expected, opened, scale, other=other, unscaled=unknown.squeeze(3))


@register
class QuantPerBlockInt8(BlockQuantiser):
    """One scale for every ``block_size`` rows of a head; values are multiplied by ``sm_scale`` first, None: not."""

    name = "quant_per_block_int8_cuda"
    summary = "SageAttention's INT8 codes, one scale for a block of rows of a head"
    source = "SageAttention 2.2 sageattention._fused.quant_per_block_int8_cuda, tensor_layout=0"
    inputs = (BlockQuantiser.x,)
    options = (
        OptionSpec("block_size", 64, (64, 128), "rows that share a scale"),
        OptionSpec("sm_scale", None, None, "what multiplies a value first; None: nothing"),
    )

    def refuse(self, inputs: Inputs, options: Options) -> None:
        scale = options["sm_scale"]
        if scale is not None and not (isinstance(scale, int | float) and 2.0**-20 <= scale <= 2.0**20):
            raise OptionError(f"{self.name}: sm_scale={scale!r}; pass None or a number from 2^-20 to 2^20")

    def smoothed(self, inputs: Inputs, options: Options) -> Tensor:
        y, scale = decode(inputs["x"]), options["sm_scale"]
        if scale is None:
            return y
        return f32(y * float(f32(torch.tensor(float(str(scale)), dtype=torch.float64, device="cpu"))))


@register
class QuantPerBlockInt8FuseSubMean(BlockQuantiser):
    """One scale for every ``block_size`` rows of a head, of the values less the ``mean`` of their head."""

    name = "quant_per_block_int8_fuse_sub_mean_cuda"
    summary = "SageAttention's INT8 codes of keys less their mean, one scale for a block of rows of a head"
    source = "SageAttention 2.2 sageattention._fused.quant_per_block_int8_fuse_sub_mean_cuda, tensor_layout=0"
    inputs = (
        BlockQuantiser.x,
        TensorSpec("mean", Kind.VALUES, HALVES, ("B", "H", "D"), "what is subtracted; the dtype of x"),
    )
    options = (OptionSpec("block_size", 64, (64, 128), "rows that share a scale"),)

    def refuse(self, inputs: Inputs, options: Options) -> None:
        if inputs["mean"].dtype is not inputs["x"].dtype:
            raise InputError(f"{self.name}: mean is {inputs['mean'].dtype}; it has the dtype of x, {inputs['x'].dtype}")

    def smoothed(self, inputs: Inputs, options: Options) -> Tensor:
        return f32(decode(inputs["x"]) - decode(inputs["mean"])[:, None])


@register
class QuantPerWarpInt8(BlockQuantiser):
    """One scale for every ``warp_block_size`` rows of a head; rows are counted up to a multiple of ``block_size``, and
    a scale without a row is 1e-7 / 127."""

    name = "quant_per_warp_int8_cuda"
    summary = "SageAttention's INT8 codes of queries, one scale for the rows of a warp"
    source = "SageAttention 2.2 sageattention._fused.quant_per_warp_int8_cuda, tensor_layout=0"
    inputs = (BlockQuantiser.x,)
    options = (
        OptionSpec("block_size", 64, (64, 128), "rows of a block"),
        OptionSpec("warp_block_size", 16, (16, 32), "rows that share a scale"),
    )

    def rows(self, options: Options) -> tuple[int, int]:
        """As of :meth:`BlockQuantiser.rows`."""
        return int(str(options["warp_block_size"])), int(str(options["block_size"]))


@register
class PerChannelFp8(Contract):
    """A channel is one of the D columns of a KV head; its scale is ``amax / scale_max`` over all keys. Codes lie as
    ``[B, D, G, P]``, P the next multiple of 64 from S on: of every 16 keys in the order 0, 1, 8, 9, 2, 3, 10, 11, 4, 5,
    12, 13, 6, 7, 14, 15, and 0 behind the last key. A channel of zeros has the codes 0 and any scale. Nothing is
    claimed of a channel with NaN or infinity, nor of one whose amax lies outside 2^-100 to 2^120."""

    name = "per_channel_fp8"
    section = "Quantisation"
    dispatched = False
    summary = "SageAttention's E4M3 codes of values, keys last and swapped, one scale for each channel"
    source = "SageAttention 2.2 sageattention.quant.per_channel_fp8, NHD, smooth_v=False"
    returns = ("v_fp8", "v_scale")
    shapes: ClassVar[Mapping[str, str]] = {"v_fp8": "[B, D, G, ceil(S / 64) * 64]", "v_scale": "[B, G, D]"}
    inputs = (TensorSpec("v", Kind.VALUES, HALVES, ("B", "S", "G", "D"), "values to quantise"),)
    options = (OptionSpec("scale_max", 448.0, None, "the largest code, up to 448"),)

    def refuse(self, inputs: Inputs, options: Options) -> None:
        most = options["scale_max"]
        if not (isinstance(most, int | float) and 1.0 <= most <= 448.0):
            raise OptionError(f"{self.name}: scale_max={most!r}; pass a number from 1 to 448")

    def outputs(self, call: Call) -> dict[str, Out]:
        batch, keys, of_keys, depth = call.inputs["v"].shape
        padded = -(-keys // PADDED) * PADDED
        return {"v_fp8": Out((batch, depth, of_keys, padded), E4M3), "v_scale": Out((batch, of_keys, depth), F32)}

    def reference(self, inputs: Inputs, **options: object) -> dict[str, Tensor]:
        """The codes and scales of exact divisions, rounded; open ones 0."""
        computed = self._computed(inputs, self.check(inputs, options))
        kinds = {"v_fp8": torch.float8_e4m3fn, "v_scale": torch.float32}
        return {name: rounded_to(x.expected.nan_to_num(nan=0.0), kinds[name]) for name, x in computed.items()}

    def kernel(self, call: Call, faults: tuple[Fault, ...] = ()) -> dict[str, Tensor]:
        inputs = fold(call, faults, Stage.READ, dict(call.inputs))
        options = fold(call, faults, Stage.OPTIONS, dict(call.resolved))
        outputs: dict[str, Tensor] = fold(call, faults, Stage.WRITE, self.reference(inputs, **options))
        return outputs

    def admissible(self, call: Call, numerics: str | None) -> list[Sets]:
        return [Elements(lambda: (self._computed(call.inputs, call.resolved), "the float32 formulas in use"))]

    def _computed(self, inputs: Inputs, options: Options) -> dict[str, Admissible]:
        v, most = decode(inputs["v"]), float(str(options["scale_max"]))
        batch, keys, of_keys, depth = v.shape
        largest = f32(torch.tensor(most, dtype=torch.float64, device=v.device))
        unknown = (~torch.isfinite(v)).any(dim=1)
        known = v.masked_fill(unknown[:, None], 0.0)
        amax = known.abs().amax(dim=1) if keys else torch.zeros_like(unknown, dtype=torch.float64)
        zero = amax == 0
        unknown = unknown | ~zero & ((amax < LEAST) | (amax > MOST))
        divisor = torch.where(zero | unknown, torch.ones_like(amax), amax)
        by = (f32(largest / divisor), fast_math.divide(largest.expand_as(divisor), divisor, flushed=True))
        codes = [decode(rounded_to(f32(known * x[:, None]), torch.float8_e4m3fn)) for x in by]
        scales = [f32(amax / largest), fast_math.divide(amax, largest.expand_as(amax), flushed=True)]

        def laid(x: Tensor) -> Tensor:
            whole = x.new_zeros((batch, -(-keys // PADDED) * PADDED, of_keys, depth))
            whole[:, slots(keys, x.device)] = x
            return whole.permute(0, 3, 2, 1).contiguous()

        low, high, first = torch.minimum(*codes), torch.maximum(*codes), codes[0]
        opened = laid(unknown[:, None].expand_as(v).contiguous())
        of_codes = Admissible(laid(low), laid(high), laid(first).masked_fill(opened, torch.nan), None, opened)
        free = unknown | zero
        ends = torch.minimum(*scales), torch.maximum(*scales)
        return {"v_fp8": of_codes, "v_scale": Admissible(*ends, scales[0].masked_fill(free, torch.nan), None, free)}
