"""Vector values for numba kernels, with one meaning on every instruction tier.

A `Vec(element, lanes)` is a numba type whose LLVM form is `<lanes x element>`,
so a kernel written in plain Python keeps its accumulators in registers. All
vectors are 16 rows wide (512 bits of 32-bit lanes); LLVM splits them into two
halves on AVX2 and four on the generic tier. Only the integer dot products,
`fma` and the half-precision conversions differ by tier, and each gives the
same bits on all of them:

* integer products are exact;
* `fma` is one rounding. The generic tier of x86-64 has no such instruction and
  computes it in float64 with round-to-odd (Boldo, Melquiond: "Emulation of FMA
  and correctly rounded sums", 2008);
* half precision is converted by integer arithmetic where F16C is missing.

The tier is fixed when this module is imported (`TIER`, from the environment of
the build process): kernels of another tier are compiled in another process,
because LLVM aborts on an instruction that its target lacks.

Memory is addressed by plain int64 addresses; nothing here checks bounds.
"""

import operator
import os
import platform

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.core.typing.templates import AbstractTemplate, infer_global
from numba.extending import intrinsic, lower_builtin, models, register_model

TIER = os.environ.get("INGLENOOK_TIER", "generic")
X86 = platform.machine().lower() in ("x86_64", "amd64")
HAS_FMA = TIER != "generic" or not X86
HAS_F16 = TIER != "generic" or not X86
HAS_AMX = TIER == "amx"
HAS_VNNI512 = TIER in ("avx512vnni", "amx")
HAS_VNNI256 = TIER == "avxvnni"
HAS_VNNI = HAS_VNNI512 or HAS_VNNI256
HAS_AVX2 = X86 and TIER != "generic"

I8, I16, I32, I64 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
F16, F32, F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()
LLVM_ELEMENT = {"i8": I8, "i16": I16, "i32": I32, "f32": F32}
NUMBA_ELEMENT = {"i8": types.int8, "i16": types.int16, "i32": types.int32, "f32": types.float32}


# Every kernel: no Python object, no exception (so no division check), the GIL released.
kernel = njit(nogil=True, error_model="numpy")


# ---------------------------------------------------------------- vector types


class Vec(types.Type):
    """A SIMD value of `lanes` elements."""

    def __init__(self, element, lanes):
        self.element, self.lanes = element, lanes
        super().__init__(name=f"{element}x{lanes}")

    @property
    def llvm(self):
        return ir.VectorType(LLVM_ELEMENT[self.element], self.lanes)

    @property
    def scalar(self):
        return NUMBA_ELEMENT[self.element]


@register_model(Vec)
class _VecModel(models.PrimitiveModel):
    def __init__(self, manager, fe_type):
        super().__init__(manager, fe_type, fe_type.llvm)


class Tile(types.Type):
    """`count` vectors of one type, kept in registers: the accumulators of `count` tokens."""

    def __init__(self, vec, count):
        self.vec, self.count = vec, count
        super().__init__(name=f"tile{count}_{vec.name}")

    @property
    def llvm(self):
        return ir.ArrayType(self.vec.llvm, self.count)


@register_model(Tile)
class _TileModel(models.PrimitiveModel):
    def __init__(self, manager, fe_type):
        super().__init__(manager, fe_type, fe_type.llvm)


i8x64 = Vec("i8", 64)
i16x32, i32x16, f32x16 = Vec("i16", 32), Vec("i32", 16), Vec("f32", 16)

int8, int16, int32, int64 = types.int8, types.int16, types.int32, types.int64
float32, float64, void = types.float32, types.float64, types.void


# ------------------------------------------------------------- defining operations


def operation(result, *arguments):
    """Decorator: `body(builder, *values)` becomes a numba intrinsic of that signature."""

    def decorate(body):
        signature = result(*arguments)

        def codegen(context, builder, _signature, values):
            value = body(builder, *values)
            return context.get_dummy_value() if result is void else value

        # numba reads the parameter list of the function it decorates.
        names = [f"a{i}" for i in range(len(arguments))]
        scope = {"signature": signature, "codegen": codegen}
        exec(f"def {body.__name__}({', '.join(['context', *names])}):\n    return signature, codegen", scope)
        return intrinsic(scope[body.__name__])

    return decorate


def _pointer(builder, address):
    return builder.inttoptr(address, ir.PointerType())


def _call(builder, name, result, *values):
    function_type = ir.FunctionType(result, [value.type for value in values])
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), list(values))


def _constant(vector_type, value):
    values = value if isinstance(value, list) else [value] * vector_type.count
    return ir.Constant(vector_type, values)


def _vector(element, lanes):
    return ir.VectorType(element, lanes)


def _shuffle(builder, first, second, lanes):
    return builder.shuffle_vector(first, second, ir.Constant(_vector(I32, len(lanes)), lanes))


def _splat(builder, value, lanes):
    vector_type = _vector(value.type, lanes)
    undefined = ir.Constant(vector_type, ir.Undefined)
    return _shuffle(builder, builder.insert_element(undefined, value, I32(0)), undefined, [0] * lanes)


def _halves(builder, value):
    lanes = value.type.count
    return (
        _shuffle(builder, value, value, list(range(lanes // 2))),
        _shuffle(builder, value, value, list(range(lanes // 2, lanes))),
    )


def _joined(builder, low, high):
    return _shuffle(builder, low, high, list(range(2 * low.type.count)))


# -------------------------------------------------------------------- memory


def _loader(result, llvm_type, align=1):
    @operation(result, int64)
    def load(builder, address):
        return builder.load(_pointer(builder, address), typ=llvm_type, align=align)

    return load


def _storer(value_type, align=1):
    @operation(void, int64, value_type)
    def store(builder, address, value):
        builder.store(value, _pointer(builder, address), align=align)

    return store


load_i8x64, load_i32x16, load_f32x16 = (_loader(t, t.llvm) for t in (i8x64, i32x16, f32x16))
store_i8x64, store_i32x16, store_f32x16 = (_storer(t) for t in (i8x64, i32x16, f32x16))
load_i32, load_i64, load_f32 = _loader(int32, I32), _loader(int64, I64), _loader(float32, F32)
store_i32, store_i64, store_f32 = _storer(int32), _storer(int64), _storer(float32)


@operation(int32, int64)
def load_i8(builder, address):
    return builder.sext(builder.load(_pointer(builder, address), typ=I8, align=1), I32)


@operation(int32, int64)
def load_u8(builder, address):
    return builder.zext(builder.load(_pointer(builder, address), typ=I8, align=1), I32)


@operation(void, int64, int32)
def store_i8(builder, address, value):
    builder.store(builder.trunc(value, I8), _pointer(builder, address), align=1)


@operation(i16x32, int64)
def load_i8x32_as_i16(builder, address):
    """32 signed bytes, widened to 16 bits."""
    bytes_ = builder.load(_pointer(builder, address), typ=_vector(I8, 32), align=1)
    return builder.sext(bytes_, _vector(I16, 32))


def _nibbles(builder, address):
    bytes_ = builder.load(_pointer(builder, address), typ=_vector(I8, 8), align=1)
    doubled = _shuffle(builder, bytes_, bytes_, [i // 2 for i in range(16)])
    wide = builder.zext(doubled, _vector(I32, 16))
    shifted = builder.lshr(wide, _constant(_vector(I32, 16), [0, 4] * 8))
    return builder.and_(shifted, _constant(_vector(I32, 16), 15))


@operation(i16x32, int64)
def load_multipliers(builder, address):
    """16 nibbles from 8 bytes (2i in the low half of byte i), plus one, each in both halves of its lane."""
    words = _vector(I32, 16)
    value = builder.add(_nibbles(builder, address), _constant(words, 1))
    return builder.bitcast(builder.or_(value, builder.shl(value, _constant(words, 16))), _vector(I16, 32))


@operation(i16x32, int64)
def load_u8x32_as_i16(builder, address):
    """32 unsigned bytes, widened to 16 bits."""
    bytes_ = builder.load(_pointer(builder, address), typ=_vector(I8, 32), align=1)
    return builder.zext(bytes_, _vector(I16, 32))


@operation(i16x32, int64)
def load_u8x16_as_pairs(builder, address):
    """16 unsigned bytes in the low halves of 16 lanes, 0 in the high halves."""
    bytes_ = builder.load(_pointer(builder, address), typ=_vector(I8, 16), align=1)
    return builder.bitcast(builder.zext(bytes_, _vector(I32, 16)), _vector(I16, 32))


def _spread(builder, words):
    """The low byte of each lane, which must be below 256, in all four of its bytes."""
    return builder.bitcast(builder.mul(words, _constant(words.type, 0x01010101)), _vector(I8, 64))


@operation(i8x64, int64)
def load_u8x16_spread(builder, address):
    """16 bytes, each in the four bytes of its lane."""
    bytes_ = builder.load(_pointer(builder, address), typ=_vector(I8, 16), align=1)
    return _spread(builder, builder.zext(bytes_, _vector(I32, 16)))


def _spread_of_pair(shift):
    @operation(i8x64, int64)
    def load(builder, address):
        pairs = builder.zext(builder.load(_pointer(builder, address), typ=_vector(I16, 16), align=1), _vector(I32, 16))
        words = pairs.type
        return _spread(builder, builder.and_(builder.lshr(pairs, _constant(words, shift)), _constant(words, 255)))

    return load


load_first_of_pairs_spread, load_second_of_pairs_spread = _spread_of_pair(0), _spread_of_pair(8)


@operation(void, int64, i32x16)
def store_i32_as_i8(builder, address, value):
    """The low bytes of 16 lanes."""
    builder.store(builder.trunc(value, _vector(I8, 16)), _pointer(builder, address), align=1)


@operation(void, int64, int32)
def store_i16(builder, address, value):
    builder.store(builder.trunc(value, I16), _pointer(builder, address), align=1)


@operation(void, int64, i32x16)
def store_second_bytes(builder, address, value):
    """Bits 8..15 of 16 lanes."""
    second = builder.lshr(value, _constant(_vector(I32, 16), 8))
    builder.store(builder.trunc(second, _vector(I8, 16)), _pointer(builder, address), align=1)


@operation(i32x16, int64)
def load_i16x16(builder, address):
    """16 signed halfwords, widened."""
    halfwords = builder.load(_pointer(builder, address), typ=_vector(I16, 16), align=1)
    return builder.sext(halfwords, _vector(I32, 16))


@operation(void, int64, i32x16)
def store_i32_as_i16(builder, address, value):
    """The low halves of 16 lanes."""
    builder.store(builder.trunc(value, _vector(I16, 16)), _pointer(builder, address), align=1)


def _prefetch(locality):
    @operation(void, int64)
    def prefetch(builder, address):
        function_type = ir.FunctionType(ir.VoidType(), [ir.PointerType(), I32, I32, I32])
        function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0")
        builder.call(function, [_pointer(builder, address), I32(0), I32(locality), I32(1)])

    return prefetch


prefetch_l1, prefetch_l2 = _prefetch(3), _prefetch(2)


# --------------------------------------------------------- half precision and bf16


def _half_to_float(builder, bits):
    """<n x i16> half bits -> <n x float>, exact."""
    lanes = bits.type.count
    floats = _vector(F32, lanes)
    if HAS_F16:
        return builder.fpext(builder.bitcast(bits, _vector(F16, lanes)), floats)
    # Move exponent and mantissa to their places in a float32, then mend the exponent's bias
    # (127 - 15) by an exact multiplication; subnormal halves come out right as well.
    words = _vector(I32, lanes)
    wide = builder.zext(bits, words)
    magnitude = builder.shl(builder.and_(wide, _constant(words, 0x7FFF)), _constant(words, 13))
    value = builder.fmul(builder.bitcast(magnitude, floats), _constant(floats, 2.0**112))
    sign = builder.shl(builder.and_(wide, _constant(words, 0x8000)), _constant(words, 16))
    return builder.bitcast(builder.or_(builder.bitcast(value, words), sign), floats)


def _float_to_half(builder, value):
    """<n x float> -> <n x i16> half bits, to nearest even; finite input."""
    lanes = value.type.count
    if HAS_F16:
        return builder.bitcast(builder.fptrunc(value, _vector(F16, lanes)), _vector(I16, lanes))
    words, floats = _vector(I32, lanes), _vector(F32, lanes)
    bits = builder.bitcast(value, words)
    sign = builder.and_(bits, _constant(words, -0x80000000))
    magnitude = builder.xor(bits, sign)
    # Subnormal halves: adding 0.5 makes the float unit round at the half's last bit.
    shifted = builder.fadd(builder.bitcast(magnitude, floats), _constant(floats, 0.5))
    small = builder.sub(builder.bitcast(shifted, words), _constant(words, 0x3F000000))
    odd = builder.and_(builder.lshr(magnitude, _constant(words, 13)), _constant(words, 1))
    rounded = builder.add(builder.add(magnitude, _constant(words, 0xFFF - (112 << 23))), odd)
    normal = builder.lshr(rounded, _constant(words, 13))
    result = builder.select(builder.icmp_unsigned("<", magnitude, _constant(words, 113 << 23)), small, normal)
    overflow = builder.icmp_unsigned(">=", magnitude, _constant(words, 0x477FF000))
    result = builder.select(overflow, _constant(words, 0x7C00), result)
    return builder.trunc(builder.or_(result, builder.lshr(sign, _constant(words, 16))), _vector(I16, lanes))


@operation(f32x16, int64)
def load_f16x16(builder, address):
    return _half_to_float(builder, builder.load(_pointer(builder, address), typ=_vector(I16, 16), align=1))


@operation(float32, int64)
def load_f16(builder, address):
    bits = builder.load(_pointer(builder, address), typ=I16, align=1)
    return builder.extract_element(_half_to_float(builder, _splat(builder, bits, 4)), I32(0))


@operation(void, int64, float32)
def store_f16(builder, address, value):
    bits = _float_to_half(builder, _splat(builder, value, 4))
    builder.store(builder.extract_element(bits, I32(0)), _pointer(builder, address), align=1)


@operation(void, int64, f32x16)
def store_f16x16(builder, address, value):
    builder.store(_float_to_half(builder, value), _pointer(builder, address), align=1)


@operation(f32x16, f32x16)
def f16_above(builder, value):
    """The smallest half-precision numbers not below these, which are finite and not negative."""
    nearest = _float_to_half(builder, value)
    below = builder.fcmp_ordered("<", _half_to_float(builder, nearest), value)
    return _half_to_float(builder, builder.add(nearest, builder.zext(below, nearest.type)))


@operation(float32, float32)
def round_to_f16(builder, value):
    """The nearest half-precision value, as float32."""
    bits = _float_to_half(builder, _splat(builder, value, 4))
    return builder.extract_element(_half_to_float(builder, bits), I32(0))


@operation(f32x16, int64)
def load_bf16x16(builder, address):
    bits = builder.load(_pointer(builder, address), typ=_vector(I16, 16), align=1)
    words = builder.shl(builder.zext(bits, _vector(I32, 16)), _constant(_vector(I32, 16), 16))
    return builder.bitcast(words, _vector(F32, 16))


@operation(float32, int64)
def load_bf16(builder, address):
    bits = builder.load(_pointer(builder, address), typ=I16, align=1)
    return builder.bitcast(builder.shl(builder.zext(bits, I32), I32(16)), F32)


# -------------------------------------------------------------------- splats


@operation(f32x16, float32)
def splat_f32(builder, value):
    return _splat(builder, value, 16)


@operation(i32x16, int32)
def splat_i32(builder, value):
    return _splat(builder, value, 16)


# ----------------------------------------------------------------- arithmetic


def _fma(builder, x, y, z):
    """x * y + z with one rounding; float or vector of float."""
    if HAS_FMA:
        name = f"llvm.fma.v{x.type.count}f32" if isinstance(x.type, ir.VectorType) else "llvm.fma.f32"
        return _call(builder, name, x.type, x, y, z)
    vector = isinstance(x.type, ir.VectorType)
    wide = _vector(F64, x.type.count) if vector else F64
    words = _vector(I64, x.type.count) if vector else I64
    number = (lambda value: _constant(words, value)) if vector else I64
    zero = _constant(wide, 0.0) if vector else F64(0.0)
    product = builder.fmul(builder.fpext(x, wide), builder.fpext(y, wide))  # exact: 24 + 24 bits
    addend = builder.fpext(z, wide)
    total = builder.fadd(product, addend)
    # Knuth's TwoSum gives the rounding error; an inexact even sum moves to its odd neighbour
    # on the error's side, after which rounding to float32 is as from the exact value.
    part = builder.fsub(total, product)
    error = builder.fadd(builder.fsub(product, builder.fsub(total, part)), builder.fsub(addend, part))
    bits = builder.bitcast(total, words)
    even = builder.icmp_signed("==", builder.and_(bits, number(1)), number(0))
    inexact = builder.fcmp_ordered("!=", error, zero)
    away = builder.icmp_signed(">=", builder.xor(builder.bitcast(error, words), bits), number(0))
    moved = builder.select(away, builder.add(bits, number(1)), builder.sub(bits, number(1)))
    odd = builder.select(builder.and_(even, inexact), moved, bits)
    return builder.fptrunc(builder.bitcast(odd, wide), x.type)


@intrinsic
def fma(typing_context, x, y, z):
    """x * y + z with a single rounding, for float32 and f32x16."""
    if x not in (f32x16, float32):
        return None
    return x(x, x, x), lambda _context, builder, _signature, values: _fma(builder, *values)


def _define(symbol, integer, real):
    """`x symbol y` for two vectors of one type."""

    @infer_global(symbol)
    class VectorOperator(AbstractTemplate):
        def generic(self, args, _kws):
            if len(args) == 2 and isinstance(args[0], Vec) and args[0] == args[1]:
                return args[0](*args)
            return None

    @lower_builtin(symbol, Vec, Vec)
    def lower(_context, builder, signature, values):
        return getattr(builder, real if signature.return_type.element == "f32" else integer)(*values)


for _symbol, _integer, _real in (
    (operator.add, "add", "fadd"),
    (operator.sub, "sub", "fsub"),
    (operator.mul, "mul", "fmul"),
    (operator.truediv, "", "fdiv"),
):
    _define(_symbol, _integer, _real)


def _maximum(builder, x, y):
    return builder.select(builder.fcmp_ordered(">", x, y), x, y)


@operation(f32x16, f32x16, f32x16)
def maximum(builder, x, y):
    """The larger of each pair; y where they compare equal or are not ordered."""
    return _maximum(builder, x, y)


@operation(f32x16, f32x16, f32x16)
def minimum(builder, x, y):
    """The smaller of each pair; y where they compare equal or are not ordered."""
    return builder.select(builder.fcmp_ordered("<", x, y), x, y)


@operation(f32x16, f32x16, f32x16, f32x16, f32x16)
def select_less(builder, a, b, x, y):
    """x in lanes where a < b, else y."""
    return builder.select(builder.fcmp_ordered("<", a, b), x, y)


@operation(f32x16, f32x16, f32x16)
def quotient_or_zero(builder, x, y):
    """x / y, and 0 in lanes where y is 0."""
    zero = _constant(_vector(F32, 16), 0.0)
    return builder.select(builder.fcmp_ordered("==", y, zero), zero, builder.fdiv(x, y))


@operation(f32x16, f32x16)
def absolute(builder, x):
    words = _vector(I32, 16)
    return builder.bitcast(builder.and_(builder.bitcast(x, words), _constant(words, 0x7FFFFFFF)), x.type)


@operation(float32, f32x16)
def sum_lanes(builder, x):
    """Lanes added as a tree: i with i + 8, then + 4, + 2, + 1."""
    for width in (8, 4, 2, 1):
        low = _shuffle(builder, x, x, list(range(width)))
        high = _shuffle(builder, x, x, list(range(width, 2 * width)))
        x = builder.fadd(low, high)
    return builder.extract_element(x, I32(0))


@operation(float32, f32x16)
def max_lanes(builder, x):
    for width in (8, 4, 2, 1):
        low = _shuffle(builder, x, x, list(range(width)))
        high = _shuffle(builder, x, x, list(range(width, 2 * width)))
        x = _maximum(builder, low, high)
    return builder.extract_element(x, I32(0))


@operation(int32, i32x16)
def sum_int_lanes(builder, x):
    for width in (8, 4, 2, 1):
        low = _shuffle(builder, x, x, list(range(width)))
        high = _shuffle(builder, x, x, list(range(width, 2 * width)))
        x = builder.add(low, high)
    return builder.extract_element(x, I32(0))


@operation(float32, float32)
def square_root(builder, x):
    return _call(builder, "llvm.sqrt.f32", F32, x)


@operation(f32x16, i32x16)
def to_float(builder, x):
    return builder.sitofp(x, _vector(F32, 16))


# Adding and taking away 1.5 * 2**23 rounds to the nearest even integer for |x| < 2**22.
ROUNDING = 12582912.0


def _round(builder, x):
    constant = _constant(x.type, ROUNDING)
    return builder.fsub(builder.fadd(x, constant), constant)


@operation(i32x16, f32x16)
def round_to_int(builder, x):
    """To the nearest integer, ties to even; |x| < 2**22."""
    return builder.fptosi(_round(builder, x), _vector(I32, 16))


@operation(f32x16, float32)
def count_up(builder, first):
    """first, first + 1, ... first + 15."""
    return builder.fadd(_splat(builder, first, 16), _constant(_vector(F32, 16), list(range(16))))


@operation(f32x16, f32x16)
def round_lanes(builder, x):
    """To the nearest integer, ties to even, as float; |x| < 2**22."""
    return _round(builder, x)


@operation(i32x16, i32x16)
def low_bits_of_code(builder, x):
    return builder.and_(x, _constant(_vector(I32, 16), 15))


@operation(i32x16, i32x16)
def high_bits_of_code(builder, x):
    return builder.lshr(x, _constant(_vector(I32, 16), 4))


@operation(f32x16, f32x16, int32)
def keep_first(builder, x, count):
    """Lanes below `count`; the others become minus infinity."""
    words = _vector(I32, 16)
    inside = builder.icmp_signed("<", _constant(words, list(range(16))), _splat(builder, count, 16))
    return builder.select(inside, x, _constant(_vector(F32, 16), float("-inf")))


@operation(f32x16, f32x16, int32)
def drop_first(builder, x, count):
    """Lanes from `count` on; those before become minus infinity."""
    words = _vector(I32, 16)
    outside = builder.icmp_signed(">=", _constant(words, list(range(16))), _splat(builder, count, 16))
    return builder.select(outside, x, _constant(_vector(F32, 16), float("-inf")))


@operation(f32x16, f32x16)
def reciprocal(builder, x):
    """1 / x for x >= 1 within some 2 units of the last place, as at 2**125 above it; a third of a division's time.

    A first guess by exponent arithmetic, then three steps of Newton's, each of which squares the error.
    """
    floats, words = x.type, _vector(I32, 16)
    x = builder.select(builder.fcmp_ordered(">", x, _constant(floats, 2.0**125)), _constant(floats, 2.0**125), x)
    guess = builder.sub(_constant(words, 0x7EF127EA), builder.bitcast(x, words))
    y, minus = builder.bitcast(guess, floats), builder.fsub(_constant(floats, 0.0), x)
    for _ in range(3):
        y = _fma(builder, y, _fma(builder, minus, y, _constant(floats, 1.0)), y)
    return y


# Degree-5 polynomial of exp on [-ln 2 / 2, ln 2 / 2] (Cephes `expf`); relative error < 2e-7.
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)


@operation(f32x16, f32x16)
def exp(builder, x):
    """e ** x; exactly 0 below -87, and as at 88 above it."""
    floats, words = _vector(F32, 16), _vector(I32, 16)

    def number(value):
        return _constant(floats, value)

    vanishes = builder.fcmp_ordered("<", x, number(-87.0))
    x = builder.select(vanishes, number(-87.0), x)
    x = builder.select(builder.fcmp_ordered(">", x, number(88.0)), number(88.0), x)
    exponent = _round(builder, builder.fmul(x, number(1.4426950408889634)))
    rest = _fma(builder, exponent, number(-0.693359375), x)
    rest = _fma(builder, exponent, number(2.12194440e-4), rest)
    value = number(_EXP[0])
    for coefficient in _EXP[1:]:
        value = _fma(builder, value, rest, number(coefficient))
    value = _fma(builder, value, builder.fmul(rest, rest), rest)
    value = builder.fadd(value, number(1.0))
    power = builder.add(builder.fptosi(exponent, words), _constant(words, 127))
    scale = builder.bitcast(builder.shl(power, _constant(words, 23)), floats)
    return builder.select(vanishes, number(0.0), builder.fmul(value, scale))


# ------------------------------------------------------- integer dot products


def _multiply_add_bytes(builder, unsigned, signed):
    """<64 x i8> u, s -> <32 x i16>: u[2i] s[2i] + u[2i+1] s[2i+1]; must stay below 2**15."""
    if HAS_AVX2:
        name, half = "llvm.x86.avx2.pmadd.ub.sw", _vector(I16, 16)
        pairs = zip(_halves(builder, unsigned), _halves(builder, signed), strict=True)
        return _joined(builder, *(_call(builder, name, half, u, s) for u, s in pairs))
    words = _vector(I16, 32)
    eight = _constant(words, 8)
    u, s = builder.bitcast(unsigned, words), builder.bitcast(signed, words)
    low = builder.mul(builder.and_(u, _constant(words, 255)), builder.ashr(builder.shl(s, eight), eight))
    return builder.add(low, builder.mul(builder.lshr(u, eight), builder.ashr(s, eight)))


def _dot_halfwords(builder, total, x, y):
    """<16 x i32> total + x[2i] y[2i] + x[2i+1] y[2i+1] for <32 x i16> x, y; exact."""
    words = _vector(I32, 16)
    if HAS_VNNI512:
        return _call(builder, "llvm.x86.avx512.vpdpwssd.512", words, total, x, y)
    if HAS_AVX2:
        half = _vector(I32, 8)
        pairs = zip(_halves(builder, x), _halves(builder, y), strict=True)
        products = [_call(builder, "llvm.x86.avx2.pmadd.wd", half, a, b) for a, b in pairs]
        return builder.add(total, _joined(builder, *products))
    even, odd = list(range(0, 32, 2)), list(range(1, 32, 2))
    for lanes in (even, odd):
        a = builder.sext(_shuffle(builder, x, x, lanes), words)
        b = builder.sext(_shuffle(builder, y, y, lanes), words)
        total = builder.add(total, builder.mul(a, b))
    return total


def _dot_unsigned(builder, total, unsigned, signed):
    """<16 x i32> total + sums of four products u8 * s8; VNNI only."""
    if HAS_VNNI512:
        return _call(builder, "llvm.x86.avx512.vpdpbusd.512", _vector(I32, 16), total, unsigned, signed)
    parts = zip(_halves(builder, total), _halves(builder, unsigned), _halves(builder, signed), strict=True)
    name = "llvm.x86.avx512.vpdpbusd.256"
    return _joined(builder, *(_call(builder, name, _vector(I32, 8), t, u, s) for t, u, s in parts))


@operation(i8x64, i8x64)
def low_nibbles(builder, codes):
    return builder.and_(codes, _constant(_vector(I8, 64), 15))


@operation(i8x64, i8x64)
def high_nibbles(builder, codes):
    words = _vector(I32, 16)
    shifted = builder.lshr(builder.bitcast(codes, words), _constant(words, 4))
    return builder.and_(builder.bitcast(shifted, _vector(I8, 64)), _constant(_vector(I8, 64), 15))


def _high_bits(place):
    """operation(low, line): the two bits at 2 * place of each byte of the line, above the low four."""

    @operation(i8x64, i8x64, i8x64)
    def join(builder, low, line):
        words, bytes_ = _vector(I32, 16), _vector(I8, 64)
        value = builder.bitcast(line, words)
        if place < 2:
            value = builder.shl(value, _constant(words, 4 - 2 * place))
        elif place > 2:
            value = builder.lshr(value, _constant(words, 2 * place - 4))
        return builder.or_(low, builder.and_(builder.bitcast(value, bytes_), _constant(bytes_, 0x30)))

    return join


with_high_bits = tuple(_high_bits(place) for place in range(4))


@operation(i8x64, i8x64, i16x32)
def multiplied_codes(builder, codes, multipliers):
    """Unsigned bytes times the multiplier of their lane: products below 256, so no byte carries into the next."""
    halfwords = _vector(I16, 32)
    return builder.bitcast(builder.mul(builder.bitcast(codes, halfwords), multipliers), codes.type)


# Without VNNI the products of codes gather in int16, to be multiplied by the group's multiplier when they are widened.
code_sum = i32x16 if HAS_VNNI else i16x32


def _dot_codes(builder, total, codes, signed):
    if HAS_VNNI:
        return _dot_unsigned(builder, total, codes, signed)
    return builder.add(total, _multiply_add_bytes(builder, codes, signed))


# What a row of int8 products starts from, per unit of minus the activations' sum: VNNI takes the
# weights as unsigned (weight + 128).
BYTES_START = 128 if HAS_VNNI else 0


def _dot_bytes(builder, total, weights, signed):
    """total + sums of four products s8 * s8 (VNNI: + 128 * sum of signed); |values| <= 127."""
    bytes_ = _vector(I8, 64)
    if HAS_VNNI:
        return _dot_unsigned(builder, total, builder.xor(weights, _constant(bytes_, -128)), signed)
    if HAS_AVX2:
        # Move the activation's sign to the weight, so that one factor is unsigned.
        half = _vector(I8, 32)
        moved = [
            _call(builder, "llvm.x86.avx2.psign.b", half, w, s)
            for w, s in zip(_halves(builder, weights), _halves(builder, signed), strict=True)
        ]
        negative = builder.icmp_signed("<", signed, _constant(bytes_, 0))
        size = builder.select(negative, builder.sub(_constant(bytes_, 0), signed), signed)
        return _dot_halfwords(
            builder,
            total,
            _multiply_add_bytes(builder, size, _joined(builder, *moved)),
            _constant(_vector(I16, 32), 1),
        )
    halfwords = _vector(I16, 32)
    even, odd = list(range(0, 64, 2)), list(range(1, 64, 2))
    products = [
        builder.mul(
            builder.sext(_shuffle(builder, weights, weights, lanes), halfwords),
            builder.sext(_shuffle(builder, signed, signed, lanes), halfwords),
        )
        for lanes in (even, odd)
    ]
    summed = builder.add(*products)  # at most 2 * 127 * 127 < 2**15
    return _dot_halfwords(builder, total, summed, _constant(halfwords, 1))


# ------------------------------------------------------------------------ tiles


def _map(builder, tile, function):
    for index in range(tile.type.count):
        tile = builder.insert_value(tile, function(index, builder.extract_value(tile, index)), index)
    return tile


def _at(builder, address, stride, index):
    return builder.add(address, builder.mul(stride, I64(index)))


def _word_at(builder, address, stride, index, llvm_type):
    return builder.load(_pointer(builder, _at(builder, address, stride, index)), typ=llvm_type, align=1)


def tiles(count):
    """The operations on tiles of `count` tokens, as a namespace."""
    from types import SimpleNamespace

    sums, integers, chunk = Tile(f32x16, count), Tile(i32x16, count), Tile(code_sum, count)

    def zero(tile):
        @operation(tile)
        def zeros(builder):
            return ir.Constant(tile.llvm, [_constant(tile.vec.llvm, 0 if tile.vec.element != "f32" else 0.0)] * count)

        return zeros

    def four_bytes(builder, address, stride, index):
        word = _word_at(builder, address, stride, index, I32)
        return builder.bitcast(_splat(builder, word, 16), _vector(I8, 64))

    @operation(chunk, chunk, i8x64, int64, int64)
    def dot_codes(builder, tile, codes, x, stride):
        """tile[m] += unsigned codes . four activations at x + m * stride."""

        def one(m, total):
            return _dot_codes(builder, total, codes, four_bytes(builder, x, stride, m))

        return _map(builder, tile, one)

    @operation(integers, integers, chunk, i16x32)
    def add_multiplied(builder, tile, narrow, multipliers):
        """tile[m] += int16 sums * multipliers, two to a lane; only where code sums are int16."""
        return _map(
            builder,
            tile,
            lambda m, total: _dot_halfwords(builder, total, builder.extract_value(narrow, m), multipliers),
        )

    @operation(integers, integers, i8x64, int64, int64)
    def dot_bytes(builder, tile, weights, x, stride):
        def one(m, total):
            return _dot_bytes(builder, total, weights, four_bytes(builder, x, stride, m))

        return _map(builder, tile, one)

    @operation(integers, int32, int64, int64)
    def sums_times(builder, factor, x_sum, stride):
        """tile[m] = factor * the int32 at x_sum + m * stride, in every lane."""
        tile = ir.Constant(integers.llvm, ir.Undefined)
        return _map(
            builder,
            tile,
            lambda m, _: _splat(builder, builder.mul(factor, _word_at(builder, x_sum, stride, m, I32)), 16),
        )

    @operation(integers, integers, i16x32, int64, int64)
    def dot_halfwords(builder, tile, values, x, stride):
        """tile[m] += pairs of values . the two int16 at x + m * stride; exact in int32."""

        def one(m, total):
            word = _splat(builder, _word_at(builder, x, stride, m, I32), 16)
            return _dot_halfwords(builder, total, values, builder.bitcast(word, _vector(I16, 32)))

        return _map(builder, tile, one)

    @operation(sums, sums, integers, f32x16, int64, int64)
    def add_scaled(builder, tile, dots, scale, x_scale, stride):
        """tile[m] = fma(float(dots[m]), scale * x_scale[m], tile[m])."""

        def one(m, total):
            both = builder.fmul(scale, _splat(builder, _word_at(builder, x_scale, stride, m, F32), 16))
            return _fma(builder, builder.sitofp(builder.extract_value(dots, m), f32x16.llvm), both, total)

        return _map(builder, tile, one)

    @operation(sums, sums, int64, f32x16, int64, int64)
    def add_scaled_stored(builder, tile, dots, scale, x_scale, stride):
        """As add_scaled, for dots that lie in memory, 16 int32 for each token."""

        def one(m, total):
            both = builder.fmul(scale, _splat(builder, _word_at(builder, x_scale, stride, m, F32), 16))
            dot = _word_at(builder, dots, I64(64), m, i32x16.llvm)
            return _fma(builder, builder.sitofp(dot, f32x16.llvm), both, total)

        return _map(builder, tile, one)

    def planes(builder, place, m):
        """256 * high + low of row m of two tiles of int32, one after the other in memory."""
        high = _word_at(builder, place, I64(64), m, i32x16.llvm)
        low = _word_at(builder, builder.add(place, I64(1024)), I64(64), m, i32x16.llvm)
        whole = builder.add(builder.shl(high, _constant(i32x16.llvm, 8)), low)
        return builder.sitofp(whole, f32x16.llvm)

    @operation(sums, sums, int64, f32x16, int64, int64)
    def add_scaled_planes(builder, tile, place, scale, x_scale, stride):
        """As add_scaled, for dots in two planes that lie in memory."""

        def one(m, total):
            both = builder.fmul(scale, _splat(builder, _word_at(builder, x_scale, stride, m, F32), 16))
            return _fma(builder, planes(builder, place, m), both, total)

        return _map(builder, tile, one)

    @operation(void, int64, int64, int64, int64)
    def store_scaled_planes(builder, address, stride, place, scales):
        """float(row m of the planes) * the float32 at scales + 4 m."""
        for m in range(count):
            scale = _splat(builder, _word_at(builder, scales, I64(4), m, F32), 16)
            value = builder.fmul(planes(builder, place, m), scale)
            builder.store(value, _pointer(builder, _at(builder, address, stride, m)), align=1)

    @operation(sums, sums, f32x16, int64, int64)
    def add_products(builder, tile, weights, x, stride):
        """tile[m] = fma(weights, x[m], tile[m]) for the float32 at x + m * stride."""
        return _map(
            builder,
            tile,
            lambda m, total: _fma(builder, weights, _splat(builder, _word_at(builder, x, stride, m, F32), 16), total),
        )

    @operation(sums, sums, sums)
    def add(builder, tile, other):
        return _map(builder, tile, lambda m, value: builder.fadd(value, builder.extract_value(other, m)))

    @operation(sums, sums, f32x16)
    def multiplied(builder, tile, factor):
        return _map(builder, tile, lambda _, value: builder.fmul(value, factor))

    @operation(sums, sums, f32x16)
    def shifted(builder, tile, addend):
        return _map(builder, tile, lambda _, value: builder.fadd(value, addend))

    @operation(void, int64, int64, sums)
    def store(builder, address, stride, tile):
        for m in range(count):
            target = _pointer(builder, _at(builder, address, stride, m))
            builder.store(builder.extract_value(tile, m), target, align=1)

    @operation(sums, int64, int64)
    def load(builder, address, stride):
        tile = ir.Constant(sums.llvm, ir.Undefined)
        return _map(builder, tile, lambda m, _: _word_at(builder, address, stride, m, f32x16.llvm))

    @operation(void, int64, int64, integers, int64)
    def store_scaled(builder, address, stride, tile, scales):
        """float(tile[m]) * the float32 at scales + 4 m."""
        for m in range(count):
            scale = _splat(builder, _word_at(builder, scales, I64(4), m, F32), 16)
            value = builder.fmul(builder.sitofp(builder.extract_value(tile, m), f32x16.llvm), scale)
            builder.store(value, _pointer(builder, _at(builder, address, stride, m)), align=1)

    @operation(void, int64, int64, sums)
    def store_added(builder, address, stride, tile):
        """What is at the address, plus the tile."""
        for m in range(count):
            target = _pointer(builder, _at(builder, address, stride, m))
            before = builder.load(target, typ=f32x16.llvm, align=1)
            builder.store(builder.fadd(before, builder.extract_value(tile, m)), target, align=1)

    return SimpleNamespace(
        count=count,
        zero_sums=zero(sums),
        zero_integers=zero(integers),
        zero_chunk=zero(chunk),
        dot_codes=dot_codes,
        add_multiplied=add_multiplied,
        dot_bytes=dot_bytes,
        sums_times=sums_times,
        dot_halfwords=dot_halfwords,
        add_scaled=add_scaled,
        add_scaled_stored=add_scaled_stored,
        add_scaled_planes=add_scaled_planes,
        store_scaled_planes=store_scaled_planes,
        add_products=add_products,
        add=add,
        multiplied=multiplied,
        shifted=shifted,
        load=load,
        store=store,
        store_scaled=store_scaled,
        store_added=store_added,
    )


# ------------------------------------------------------------------------ AMX


@operation(i8x64, i8x64, i8x64)
def minus_bytes(builder, x, y):
    return builder.sub(x, y)


@operation(i8x64, int64, int64)
def load_interleaved(builder, first, second):
    """16 halfwords from each address, one from the first before its fellow from the second."""
    halfwords = _vector(I16, 16)
    values = [builder.load(_pointer(builder, address), typ=halfwords, align=1) for address in (first, second)]
    lanes = [lane for pair in zip(range(16), range(16, 32), strict=True) for lane in pair]
    return builder.bitcast(_shuffle(builder, *values, lanes), _vector(I8, 64))


@operation(void, int64)
def tile_configure(builder, address):
    _call(builder, "llvm.x86.ldtilecfg", ir.VoidType(), _pointer(builder, address))


@operation(void)
def tile_release(builder):
    _call(builder, "llvm.x86.tilerelease", ir.VoidType())


def tile_registers(products, left, right):
    """The operations on three tile registers, as a namespace; their numbers are part of the instructions."""
    from types import SimpleNamespace

    products, left, right = I8(products), I8(left), I8(right)

    def of(name, *registers):
        @operation(void)
        def instruction(builder):
            _call(builder, f"llvm.x86.{name}", ir.VoidType(), *registers)

        return instruction

    def moving(name, register):
        @operation(void, int64, int64)
        def instruction(builder, address, stride):
            _call(builder, f"llvm.x86.{name}", ir.VoidType(), register, _pointer(builder, address), stride)

        return instruction

    return SimpleNamespace(
        zero=of("tilezero", products),
        # products += left . right, int8 (dot_unsigned: uint8) times int8 into int32
        dot=of("tdpbssd", products, left, right),
        dot_unsigned=of("tdpbusd", products, left, right),
        load_left=moving("tileloadd64", left),
        load_right=moving("tileloadd64", right),
        store=moving("tilestored64", products),
    )


# ----------------------------------------------------------- threads and clocks


@operation(void)
def pause(builder):
    """Tell the core that this is a spin loop."""
    if X86:
        _call(builder, "llvm.x86.sse2.pause", ir.VoidType())
    else:
        builder.fence("seq_cst")


@operation(void, int64)
def set_rounding(builder, address):
    """Take the float unit's control word from the address: 0x1F80 is IEEE 754 as it stands.

    A library elsewhere in the process may have made subnormal numbers vanish; results must not depend on it.
    """
    if X86:
        _call(builder, "llvm.x86.sse.ldmxcsr", ir.VoidType(), _pointer(builder, address))


@operation(int64, int64, int64)
def atomic_add(builder, address, value):
    """Add to the int64 at the address; returns what was there."""
    return builder.atomic_rmw("add", _pointer(builder, address), value, "seq_cst")


@operation(int64, int64)
def atomic_load(builder, address):
    return builder.load_atomic(_pointer(builder, address), "seq_cst", 8, typ=I64)


@operation(void, int64, int64)
def atomic_store(builder, address, value):
    # llvmlite's store_atomic wants a typed pointer.
    builder.store_atomic(value, builder.inttoptr(address, I64.as_pointer()), "seq_cst", 8)


@operation(int64, int64, int64, int64, int64, int64, int64, int64, int64)
def call_address(builder, function, a, b, c, d, e, f, g):
    """Call a C function of seven 64-bit integers by its address (the operating system's wait and wake)."""
    function_type = ir.FunctionType(I64, [I64] * 7)
    return builder.call(builder.inttoptr(function, function_type.as_pointer()), [a, b, c, d, e, f, g])
