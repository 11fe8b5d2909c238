"""The entry points that object code exports: name, function, and how many int64 arguments."""

from engine.core.kernels import packing, team
from engine.core.kernels.simd import float32, kernel, load_f32x16, maximum, prefetch_l2, splat_f32, store_f32x16


@kernel
def read(address, size, out):
    """Read `size` bytes (a multiple of 256) and do nearly nothing: the bandwidth that a product could reach."""
    a = b = c = d = splat_f32(float32(0.0))
    for place in range(address, address + size, 256):
        for line in range(4):
            prefetch_l2(place + 64 * line + 8192)
        a = maximum(load_f32x16(place), a)
        b = maximum(load_f32x16(place + 64), b)
        c = maximum(load_f32x16(place + 128), c)
        d = maximum(load_f32x16(place + 192), d)
    store_f32x16(out, maximum(maximum(a, b), maximum(c, d)))


ENTRY_POINTS = {
    "enter": (team.enter, 3),
    "pack": (packing.pack, 3),
    "read": (read, 3),
}
