"""Vector instructions for compiled loops, on CPUs with AVX2: what LLVM's optimizer does not find by itself.

`Vectors` is a small vocabulary (loads, broadcasts, tiles that stay in registers, SiLU) in which the inner loops of
`lcs.model.convolution` and the element-wise loops below are written. Loops over short rows of channels that numba
compiles by itself take four times as long: for every row they check at run time whether arrays overlap, and where a
result is written over its input they go through it one number at a time.

SiLU needs a sigmoid, (1 + tanh(x / 2)) / 2. tanh(u) is u times a ratio of two polynomials in u^2 (our least-squares
fit on |u| < 9, error 6e-8 before float32 rounding): no branch, no call.
"""

from __future__ import annotations

from llvmlite import binding, ir
from numba.core import cgutils, types
from numba.extending import intrinsic

EPS = 1e-4  # added to every norm
TANH = (0.999999983, 0.133924322, 0.00350913365, 2.08319377e-05, 1.3663397e-08)  # coefficients of 1, u^2, u^4, ...
TANH_OVER = (1.0, 0.467257508, 0.0259285184, 0.000330778486, 7.90293108e-07)
TANH_TOP = 9.0  # tanh is 1 to float32 beyond
LANES = 8  # float32 numbers in an AVX2 register
VECTORS = 2  # registers side by side in a tile
WIDTH = LANES * VECTORS  # numbers in a row of a tile

_features = binding.get_host_cpu_features()
# Processors with wider registers have good kernels of their own in PyTorch's library.
AVX2 = _features.get("avx2", False) and _features.get("fma", False) and not _features.get("avx512f", False)


class Vectors:
    """Instructions on vectors of LANES numbers, written at the place of a builder; addresses are int64."""

    def __init__(self, builder: ir.IRBuilder) -> None:
        self.builder, self.number, self.integer = builder, ir.FloatType(), ir.IntType(64)
        self.vector = ir.VectorType(self.number, LANES)
        self.zero = ir.Constant(self.vector, [0.0] * LANES)
        self._fma = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(self.vector, [self.vector] * 3), f"llvm.fma.v{LANES}f32"
        )

    def at(self, base, index, stride):
        """The address base + index stride; index and stride may be numbers"""
        index, stride = (self.integer(v) if isinstance(v, int) else v for v in (index, stride))
        return self.builder.add(base, self.builder.mul(index, stride))

    def _pointer(self, address, kind):
        return self.builder.inttoptr(address, ir.PointerType(kind))

    def load(self, address, kind=None):
        return self.builder.load(self._pointer(address, kind or self.vector), align=4)

    def store(self, value, address) -> None:
        self.builder.store(value, self._pointer(address, value.type), align=4)

    def broadcast(self, scalar):
        undefined, index = ir.Constant(self.vector, ir.Undefined), ir.IntType(32)
        first = self.builder.insert_element(undefined, scalar, index(0))
        return self.builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(index, LANES), [0] * LANES))

    def tile(self, rows: int) -> list[list]:
        """rows x WIDTH numbers, all zero: variables that the optimizer keeps in registers"""
        tile = [[cgutils.alloca_once(self.builder, self.vector) for _ in range(VECTORS)] for _ in range(rows)]
        for row in tile:
            for part in row:
                self.builder.store(self.zero, part)
        return tile

    def add_outer_product(self, tile: list[list], scalars: list, vectors_at) -> None:
        """tile += scalars (addresses) x the WIDTH numbers at an address"""
        vectors = [self.load(self.at(vectors_at, v, 4 * LANES)) for v in range(VECTORS)]
        for row, scalar in zip(tile, scalars, strict=True):
            factor = self.broadcast(self.load(scalar, self.number))
            for part, vector in zip(row, vectors, strict=True):
                self.builder.store(self.fma(factor, vector, self.builder.load(part)), part)

    def fma(self, a, b, c):
        """a b + c"""
        return self.builder.call(self._fma, (a, b, c))

    def constant(self, value: float):
        return ir.Constant(self.vector, [float(value)] * LANES)

    def clamp(self, x, bound):
        """x within +-bound (vectors)"""
        low = self.builder.fneg(bound)
        x = self.builder.select(self.builder.fcmp_ordered("<", x, low), low, x)
        return self.builder.select(self.builder.fcmp_ordered(">", x, bound), bound, x)

    def polynomial(self, t, *coefficients):
        value = self.constant(coefficients[-1])
        for c in reversed(coefficients[:-1]):
            value = self.fma(value, t, self.constant(c))
        return value

    def sigmoid(self, x):
        """(1 + tanh(x / 2)) / 2"""
        b, half = self.builder, self.constant(0.5)
        u = self.clamp(b.fmul(x, half), self.constant(TANH_TOP))
        t = b.fmul(u, u)
        ratio = b.fdiv(b.fmul(u, self.polynomial(t, *TANH)), self.polynomial(t, *TANH_OVER))
        return self.fma(half, ratio, half)

    def sum(self, x):
        """The sum of a vector's numbers, in a fixed order: halves are added until one number is left."""
        index, b = ir.IntType(32), self.builder
        width = LANES
        while width > 1:
            width //= 2
            kind, undefined = ir.VectorType(index, width), ir.Constant(x.type, ir.Undefined)
            low = b.shuffle_vector(x, undefined, ir.Constant(kind, list(range(width))))
            high = b.shuffle_vector(x, undefined, ir.Constant(kind, list(range(width, 2 * width))))
            x = b.fadd(low, high)
        return b.extract_element(x, index(0))

    def for_pixels(self, pixels, channels, streams: list[tuple], body) -> None:
        """body(addresses) for every vector of every pixel; a stream is (address, bytes from pixel to pixel)"""
        steps = self.builder.udiv(channels, self.integer(LANES))
        with cgutils.for_range(self.builder, pixels) as outer:
            rows = [self.at(address, outer.index, pixel) for address, pixel in streams]
            with cgutils.for_range(self.builder, steps) as inner:
                body(*(self.at(row, inner.index, 4 * LANES) for row in rows))

    def silu_slope(self, x):
        """silu'(x) = s (1 + x (1 - s)), s = sigmoid(x)"""
        s, one = self.sigmoid(x), self.constant(1)
        return self.builder.fmul(s, self.fma(x, self.builder.fsub(one, s), one))


# ---- element-wise loops ---------------------------------------------------------------------------
# Arguments are int64: addresses, bytes from pixel to pixel (`..._pixel`), numbers of pixels and of channels, a multiple
# of LANES. `scale` is the address of one number per channel. An output may be one of the inputs.


def _loop(arguments: int, write):
    """What an intrinsic returns: its signature, and code that `write(v, *arguments)` writes."""

    def generate(target, builder: ir.IRBuilder, signature, args):
        write(Vectors(builder), *args)
        return target.get_dummy_value()

    return types.void(*(types.int64,) * arguments), generate


@intrinsic
def silu_rows(context, x, x_pixel, scale, out, out_pixel, pixels, channels):
    """out = silu(scale x)"""

    def write(v, x, x_pixel, scale, out, out_pixel, pixels, channels):
        def body(x, scale, out):
            value = v.builder.fmul(v.load(x), v.load(scale))
            v.store(v.builder.fmul(value, v.sigmoid(value)), out)

        v.for_pixels(pixels, channels, [(x, x_pixel), (scale, 0), (out, out_pixel)], body)

    return _loop(7, write)


@intrinsic
def scaled_silu_rows(context, x, x_pixel, scale, out, act, out_pixel, pixels, channels):
    """out = scale x, act = silu(out)"""

    def write(v, x, x_pixel, scale, out, act, out_pixel, pixels, channels):
        def body(x, scale, out, act):
            value = v.builder.fmul(v.load(x), v.load(scale))
            v.store(value, out)
            v.store(v.builder.fmul(value, v.sigmoid(value)), act)

        v.for_pixels(pixels, channels, [(x, x_pixel), (scale, 0), (out, out_pixel), (act, out_pixel)], body)

    return _loop(8, write)


@intrinsic
def scaled_silu_back_rows(context, out, grad_out, grad_act, out_pixel, scale, grad_x, x_pixel, pixels, channels):
    """grad_x = scale (grad_out + grad_act silu'(out)): the derivative of `scaled_silu_rows`"""

    def write(v, out, grad_out, grad_act, out_pixel, scale, grad_x, x_pixel, pixels, channels):
        def body(out, grad_out, grad_act, scale, grad_x):
            g = v.fma(v.load(grad_act), v.silu_slope(v.load(out)), v.load(grad_out))
            v.store(v.builder.fmul(v.load(scale), g), grad_x)

        streams = [(out, out_pixel), (grad_out, out_pixel), (grad_act, out_pixel), (scale, 0), (grad_x, x_pixel)]
        v.for_pixels(pixels, channels, streams, body)

    return _loop(9, write)


@intrinsic
def silu_back_rows(context, x, scale, grad, grad_x, grad_scale, pixels, channels):
    """g = grad silu'(scale x); grad_x = scale g; grad_scale += sum over pixels of x g. Pixels lie side by side."""

    def write(v, x, scale, grad, grad_x, grad_scale, pixels, channels):
        def body(x, scale, grad, grad_x, grad_scale):
            value, factor = v.load(x), v.load(scale)
            g = v.builder.fmul(v.load(grad), v.silu_slope(v.builder.fmul(value, factor)))
            v.store(v.builder.fmul(g, factor), grad_x)
            v.store(v.fma(value, g, v.load(grad_scale)), grad_scale)

        pixel = v.builder.mul(channels, v.integer(4))
        streams = [(x, pixel), (scale, 0), (grad, pixel), (grad_x, pixel), (grad_scale, 0)]
        v.for_pixels(pixels, channels, streams, body)

    return _loop(7, write)


@intrinsic
def norm_rows(context, x, out, factors, pixels, channels):
    """out = f x, f = 1 / (eps + |x| / sqrt(C)) for each pixel, kept in factors. Pixels lie side by side."""

    def write(v, x, out, factors, pixels, channels):
        b = v.builder
        steps, square = b.udiv(channels, v.integer(LANES)), cgutils.alloca_once(b, v.vector)
        root = cgutils.get_or_insert_function(b.module, ir.FunctionType(v.number, [v.number]), "llvm.sqrt.f32")
        pixel = b.mul(channels, v.integer(4))
        with cgutils.for_range(b, pixels) as outer:
            x_at, out_at = v.at(x, outer.index, pixel), v.at(out, outer.index, pixel)
            b.store(v.zero, square)
            with cgutils.for_range(b, steps) as inner:
                value = v.load(v.at(x_at, inner.index, 4 * LANES))
                b.store(v.fma(value, value, b.load(square)), square)
            mean = b.fdiv(v.sum(b.load(square)), b.sitofp(channels, v.number))
            factor = b.fdiv(v.number(1.0), b.fadd(b.call(root, [mean]), v.number(EPS)))
            v.store(factor, v.at(factors, outer.index, 4))
            factor = v.broadcast(factor)
            with cgutils.for_range(b, steps) as inner:
                value = v.load(v.at(x_at, inner.index, 4 * LANES))
                v.store(b.fmul(value, factor), v.at(out_at, inner.index, 4 * LANES))

    return _loop(5, write)


@intrinsic
def norm_silu_back_rows(context, out, factors, grad_out, grad_act, grad_x, pixels, channels):
    """g = grad_out + grad_act silu'(out); grad_x = f (g - <out, g> out / (C f r)), r = |x| / sqrt(C) = 1 / f - eps.

    For d f / d x = -f^2 x / (C r) and x = out / f.
    """

    def write(v, out, factors, grad_out, grad_act, grad_x, pixels, channels):
        b = v.builder
        steps, along = b.udiv(channels, v.integer(LANES)), cgutils.alloca_once(b, v.vector)
        pixel = b.mul(channels, v.integer(4))
        with cgutils.for_range(b, pixels) as outer:
            out_at, go_at, ga_at, gx_at = (v.at(base, outer.index, pixel) for base in (out, grad_out, grad_act, grad_x))
            b.store(v.zero, along)
            with cgutils.for_range(b, steps) as inner:
                at = b.mul(inner.index, v.integer(4 * LANES))
                value = v.load(b.add(out_at, at))
                g = v.fma(v.load(b.add(ga_at, at)), v.silu_slope(value), v.load(b.add(go_at, at)))
                v.store(g, b.add(gx_at, at))
                b.store(v.fma(value, g, b.load(along)), along)
            f = v.load(v.at(factors, outer.index, 4), v.number)
            r = b.fsub(b.fdiv(v.number(1.0), f), v.number(EPS))
            r = b.select(b.fcmp_ordered("<", r, v.number(1e-12)), v.number(1e-12), r)
            share = b.fdiv(v.sum(b.load(along)), b.fmul(b.sitofp(channels, v.number), b.fmul(f, r)))
            minus, factor = v.broadcast(b.fneg(share)), v.broadcast(f)
            with cgutils.for_range(b, steps) as inner:
                at = b.mul(inner.index, v.integer(4 * LANES))
                g = v.fma(minus, v.load(b.add(out_at, at)), v.load(b.add(gx_at, at)))
                v.store(b.fmul(factor, g), b.add(gx_at, at))

    return _loop(7, write)
