"""Counter-based standard normal numbers, and the device functions that other kernels
draw them with.

Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011)
and the Box-Muller transform:

    counter = (block low 32 bits, block high 32 bits, step, stream),   key = two 32-bit words
    element e of a row = number e % 4 of block e // 4
    words (w, w') -> (r cos angle, r sin angle),  r = sqrt(-2 ln(w 2^-32 + 2^-33)),  angle = 2 pi w' 2^-32

A number depends on (key, step, stream, e) alone: not on the launch geometry or the
batch that asks for it. The integer words are those of the reference bit for bit; the
numbers agree to about 1e-6, by which float32 logarithms and sines of different
processors differ.

Shapes: B rows, N elements of a row, K blocks of four numbers.
"""

import triton
import triton.language as tl

ROUNDS = tl.constexpr(10)
MULTIPLIER_0 = tl.constexpr(0xD2511F53)
MULTIPLIER_1 = tl.constexpr(0xCD9E8D57)
WEYL_0 = tl.constexpr(0x9E3779B9)
WEYL_1 = tl.constexpr(0xBB67AE85)

TWO_PI = tl.constexpr(6.283185307179586)
TWO_OVER_PI = tl.constexpr(0.6366197723675814)
# pi/2 in three parts. The first two have so few bits that their products with a
# quadrant number are exact.
HALF_PI_HIGH = tl.constexpr(1.5703125)
HALF_PI_MIDDLE = tl.constexpr(4.837512969970703125e-4)
HALF_PI_LOW = tl.constexpr(7.54978995489188216e-8)


@triton.jit
def philox_words(i_block, k0, k1, step, stream):
    """Four uint32 tensors for the blocks i_block (int64), key (k0, k1, uint32), step
    and stream.
    """
    c0 = (i_block & 0xFFFFFFFF).to(tl.uint32)
    c1 = (i_block >> 32).to(tl.uint32)
    c2 = (tl.zeros_like(c0) + step).to(tl.uint32)
    c3 = (tl.zeros_like(c0) + stream).to(tl.uint32)
    for _ in tl.static_range(ROUNDS):
        high_0 = tl.umulhi(c0, MULTIPLIER_0)
        low_0 = c0 * MULTIPLIER_0
        high_1 = tl.umulhi(c2, MULTIPLIER_1)
        low_1 = c2 * MULTIPLIER_1
        c0 = high_1 ^ c1 ^ k0
        c1 = low_1
        c2 = high_0 ^ c3 ^ k1
        c3 = low_0
        k0 += WEYL_0
        k1 += WEYL_1
    return c0, c1, c2, c3


@triton.jit
def cos_sin(angle):
    """Cosine and sine of an angle in [0, 2 pi], float32, within 2 units in the last
    place of 1.

    libdevice's versions serve any angle, and the range reduction they carry for that
    spills an array to local memory. Here the quadrant is one of 0..4 and the remainder,
    at most pi/4, goes through the polynomials of Cephes' sinf.c.
    """
    quadrant = tl.floor(angle * TWO_OVER_PI + 0.5)
    x = (
        angle
        - quadrant * HALF_PI_HIGH
        - quadrant * HALF_PI_MIDDLE
        - quadrant * HALF_PI_LOW
    )
    z = x * x
    sine = ((-1.9515295891e-4 * z + 8.3321608736e-3) * z - 1.6666654611e-1) * z * x + x
    cosine = (
        ((2.443315711809948e-5 * z - 1.388731625493765e-3) * z + 4.166664568298827e-2)
        * z
        * z
        - 0.5 * z
        + 1.0
    )
    q = quadrant.to(tl.int32)
    odd = (q & 1) == 1
    cos_value = tl.where(odd, sine, cosine)
    sin_value = tl.where(odd, cosine, sine)
    cos_value = tl.where(((q + 1) & 2) == 2, -cos_value, cos_value)
    sin_value = tl.where((q & 2) == 2, -sin_value, sin_value)
    return cos_value, sin_value


@triton.jit
def box_muller(first, second):
    """Two float32 standard normal tensors from two uint32 tensors."""
    # The half step keeps u away from 0; the largest magnitude is sqrt(66 ln 2) = 6.76.
    uniform = first.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10
    angle = second.to(tl.float32) * 2.3283064365386963e-10 * TWO_PI
    radius = tl.sqrt_rn(-2.0 * tl.log(uniform))
    cos_value, sin_value = cos_sin(angle)
    return radius * cos_value, radius * sin_value


@triton.jit
def normal_tile(i_block, k0, k1, step, stream):
    """4K numbers in element order for the K blocks i_block (int64)."""
    w0, w1, w2, w3 = philox_words(i_block, k0, k1, step, stream)
    n0, n1 = box_muller(w0, w1)
    n2, n3 = box_muller(w2, w3)
    return tl.interleave(tl.interleave(n0, n2), tl.interleave(n1, n3))


@triton.jit
def row_noise(p_noise_ids, i_row, i_tile, BLOCK: tl.constexpr):
    """The numbers of a row's BLOCK elements from i_tile * BLOCK on; p_noise_ids (B, 3)
    int64.
    """
    BLOCKS: tl.constexpr = BLOCK // 4
    k0 = tl.load(p_noise_ids + i_row * 3).to(tl.uint32)
    k1 = tl.load(p_noise_ids + i_row * 3 + 1).to(tl.uint32)
    step = tl.load(p_noise_ids + i_row * 3 + 2).to(tl.uint32)
    return normal_tile(i_tile * BLOCKS + tl.arange(0, BLOCKS), k0, k1, step, 0)
