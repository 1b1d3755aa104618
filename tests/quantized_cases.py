"""Test cases with quantized weights. Every engine must return the same results, up to rounding, as with the matrices
that `mx.dequantize` returns."""

import mlx.core as mx
import numpy as np
from assertions import assert_within
from cases import draw_away_from_kinks, judge, run, to_mlx

from mlx_lstm import Quantized
from mlx_lstm.engines.ops.packed import matrix_for_oracle
from mlx_lstm.engines.packing import WIDTHS
from mlx_lstm.oracle import ARRAYS

PACKINGS = [(group, bits, mode) for mode, (groups, widths) in WIDTHS.items() for group in groups for bits in widths]
"""Every (group size, bits, mode) of quantized weights that MLX supports."""

WEIGHTS = ("Wx", "Wh", "Wp")


def packed(matrix, group_size, bits, mode):
    """Return the quantized weight of an MLX matrix, computed by `mx.quantize`."""
    return Quantized(*mx.quantize(matrix, group_size, bits, mode), group_size=group_size, bits=bits, mode=mode)


def matrix_of(weight):
    """Return the matrix that `mx.dequantize` returns for a quantized weight, with scales and biases in float32."""
    scales, biases = weight.scales, weight.biases
    if biases is not None:  # convert them, because with 16-bit scales MLX would compute in 16 bits
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    how = {"group_size": weight.group_size, "bits": weight.bits, "mode": weight.mode, "dtype": mx.float32}
    return mx.dequantize(weight.packed, scales, biases, **how)


def quantized_case(
    packing=(32, 4, "affine"), dtype=np.float32, sizes=(3, 2, 32, 32, 32), quantize=WEIGHTS, seed=0, **options
):
    """Draw random arrays for sizes T, B, I, H, P and quantize the weights. Return (case, cotangents, quantized
    weights, exact results, error bounds). The case holds the arrays and options, with dequantized weights. The exact
    results are those of the float64 oracle."""
    with mx.stream(mx.cpu):
        case, cotangents = draw_away_from_kinks(seed, 1e-3, sizes=sizes, recurrent=0.2, **options)
        case, cotangents = (
            {n: v.astype(dtype) if isinstance(v, np.ndarray) and v.dtype.kind == "f" else v for n, v in some.items()}
            for some in (case, cotangents)
        )
        weights = {n: packed(to_mlx(case[n], dtype), *packing) for n in quantize if case.get(n) is not None}
        case |= {n: matrix_for_oracle(weight.packing, weight.arrays(n), n) for n, weight in weights.items()}
    return case, cotangents, weights, *judge(case, dtype, cotangents)


def check_quantized(engine, prepared, dtype=np.float32, backward=True):
    """Run the engine with the quantized weights of `prepared`, a result of `quantized_case`. Check that outputs and
    gradients are within the error bounds for this dtype. backward: whether the gradients are computed."""
    case, cotangents, weights, exact, limits = prepared
    outputs, gradients = run(case, engine, dtype, cotangents if backward else None, weights)
    wanted = {name for name in ARRAYS if case.get(name) is not None} - set(weights)
    assert set(gradients) == (wanted if backward else set())
    for of_pass, arrays in (("forward", outputs), ("backward, gradient of", gradients)):
        for name, value in arrays.items():
            assert value.dtype == dtype
            assert_within(f"{engine}, {of_pass} {name}", value, exact[name], limits[name])
