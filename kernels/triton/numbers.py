"""Device functions: 8-bit floats, and products of blocks."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,no-any-return,untyped-decorator,misc"

import triton
import triton.language as tl

from sglang_kv.kernels.triton.launch import INTERPRETED

_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def widen(x, DTYPE: tl.constexpr, FP8: tl.constexpr):
    """Stored numbers as `DTYPE`.

    `FP8` is 0, or, if they are bits of 8-bit floats in uint8, how many of those are mantissa; that
    is for GPUs that cannot convert them (before sm_89). Exponent and mantissa are put where fp16
    has them; the biases of e4m3 and fp16 differ by 8, and fp16 holds every value exactly, subnormal
    ones too.
    """
    if FP8 == 3:
        bits = x.to(tl.uint16)
        moved = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        value = moved.to(tl.float16, bitcast=True) * 256.0
        return tl.where((bits & 0x7F) == 0x7F, float("nan"), value).to(DTYPE)
    if FP8 == 2:
        return (x.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(DTYPE)
    return x.to(DTYPE)


@triton.jit
def fp8_bits(
    x, MANTISSA: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr, NAN: tl.constexpr
):
    """fp32 as 8-bit floats in uint8, to the nearest, ties to even; too large ones to the largest.

    In integers, so that every GPU and the interpreter give the same bits.
    """
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    size = tl.minimum(tl.abs(x), LARGEST)
    bits = size.to(tl.uint32, bitcast=True)
    cut: tl.constexpr = 23 - MANTISSA
    rounded = bits + ((1 << (cut - 1)) - 1) + ((bits >> cut) & 1)
    normal = (rounded >> cut) - ((127 - BIAS) << MANTISSA)
    # A subnormal is a multiple of the smallest one; adding 2^23 rounds to whole multiples.
    multiples = size * (2.0 ** (BIAS - 1 + MANTISSA)) + 8388608.0
    subnormal = multiples.to(tl.uint32, bitcast=True) & 0xFF
    code = tl.where(size < 2.0 ** (1 - BIAS), subnormal, normal)
    code = tl.where(x != x, NAN, code)
    return (code | sign).to(tl.uint8)


@triton.jit
def narrow(x, DTYPE: tl.constexpr, FP8: tl.constexpr):
    """fp32 as it is stored: as `DTYPE`, or as bits of the 8-bit float with `FP8` of mantissa."""
    if FP8 == 3:
        return fp8_bits(x, 3, 7, 448.0, 0x7F)
    if FP8 == 2:
        return fp8_bits(x, 2, 15, 57344.0, 0x7F)
    return round_to(x, DTYPE)


@triton.jit
def round_to(x, DTYPE: tl.constexpr):
    """fp32 to the nearest number of `DTYPE`, ties to even."""
    if _INTERPRETED and tl.bfloat16 == DTYPE:
        # The interpreter cuts bits off.
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    return x.to(DTYPE)


@triton.jit
def dot(a, b):
    """a x b, summed in fp32."""
    if _INTERPRETED:
        # It would multiply the bits of bf16. Products of 16-bit floats are exact in fp32, as they
        # are in tensor cores.
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def to_logits(scores, SOFT_CAP: tl.constexpr, scale, cap):
    """Base-2 logits. With `SOFT_CAP`, cap * tanh(scores * scale / 2), in `scale`'s own units.

    The host folds log2(e), the soft cap and the scale of the keys into the two factors.
    """
    if SOFT_CAP:
        return cap - 2.0 * cap / (tl.exp2(scores * scale) + 1.0)
    return scores * scale
