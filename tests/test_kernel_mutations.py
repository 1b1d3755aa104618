"""Check that the tests of the Metal kernels notice errors. Each test here damages the shaders in one place at a
time. The comparison with the oracle, or the emulator, must notice every damage."""

from types import MappingProxyType
from unittest.mock import patch

import mlx.core as mx
import numpy as np
import pytest
from assertions import assert_within, bounds
from cases import draw, draw_cotangents, elementwise_bounds, judge, run
from metal_emulator import coverage, mutations
from metal_emulator.findings import KernelError
from norm_cases import CELLS as NORMED
from norm_cases import check as check_norm
from on_metal import matrices_from, on_metal
from own_cells import Judge as OwnJudge
from own_cells import library
from pointwise_cases import ZOO, Form, assert_right, by_pointwise, draw_smooth, judged
from pointwise_cases import draw as draw_arrays
from pointwise_cases import run as run_cell
from quantized_cases import quantized_case
from test_pointwise_paths import PATHS, case_of

from mlx_lstm.engines.metal import fused as kernels_fused
from mlx_lstm.engines.metal import kernel as kernels
from mlx_lstm.engines.problem import Cut, limited
from mlx_lstm.ground.machine import shader_folder
from mlx_lstm.oracle import forward

pytestmark = pytest.mark.not_on_a_mac("damaged kernels: a GPU may hang, and the emulator is to notice them")

LAYERS = {
    "lstm": {"peephole": True, "cell_clip": 0.5},
    "gru": {"op": "gru"},
    "gru_before": {"op": "gru", "reset": "before"},
    "rnn": {"op": "rnn"},
    "projection": {"peephole": True, "cell_clip": 0.5, "projection": True},
    "projection_unmasked": {"projection": True, "mask": None},
}

# {shader file: ({engine: names of LAYERS that use the file}, batch sizes at which they use the file)}
USERS = {
    "stepwise": ({"stepwise": ["projection"]}, (4, 9)),
    "stepwise_lanes": ({"stepwise": ["projection"]}, (3, 4)),
    "stepwise_tiles": ({"stepwise": ["projection", "gru"]}, (9, 33)),
    "quantized": ({"stepwise": []}, ()),  # `trials` makes separate cases for the quantized files
    "stepwise_quantized": ({"stepwise": []}, ()),
    "stepwise_forward": ({"stepwise": ["projection", "gru"]}, (4, 9)),
    "stepwise_backward": ({"stepwise": ["projection", "gru"]}, (3, 9)),
    "stepwise_gru": ({"stepwise": ["gru_before"]}, (3, 9)),
    "stepwise_rows": ({"stepwise": ["rnn", "lstm", "gru", "projection", "projection_unmasked"]}, (3, 9)),
    "fused": ({"fused": ["lstm", "gru", "rnn"]}, (3, 19)),
    "fused_lanes": ({"fused": ["lstm", "gru", "rnn"]}, (3, 19)),
    "fused_gru": ({"fused": ["gru", "gru_before"]}, (3, 19)),
    "fused_forward": ({"fused": ["lstm", "gru_before"]}, (3, 19)),
    "fused_backward": ({"fused": ["lstm", "gru", "gru_before"]}, (3, 19)),
    "fused_arrange": ({"fused": ["lstm", "gru_before"]}, (3, 19)),
    "fused_quantized": ({"fused": []}, ()),
    "fused_matrix": ({"fused": ["lstm", "gru"]}, (9, 19)),
    "recurrent_input": ({"fused": ["gru"]}, (3,)),
    "norm": ({"fused": []}, ()),  # `trials` makes separate cases for layer normalisation
    "fused_norm": ({"fused": []}, ()),
    "stepwise_norm": ({"stepwise": []}, ()),
    "fused_norm_own": ({"fused": []}, ()),
    "pointwise": ({"fused": []}, ()),  # `trials` makes separate cases for cells given as a function
    "pointwise_forward": ({"fused": []}, ()),
    "pointwise_backward": ({"fused": []}, ()),
    "cell": ({"stepwise": ["projection"]}, (3,)),
    "cell_lstm": ({"stepwise": ["projection"], "fused": ["lstm"]}, (3, 19)),
}
# Quantized cases for `stepwise`: ((group size, bits, mode), (T, B, I, H, P)). With B = 1 the lanes of a SIMD group
# compute a product; in some cases a part of the lanes has no work. With B = 8 tiles compute a product; in some cases
# the last tile is half empty.
PACKED = [
    *[(packing, (2, 1, 2, H, H)) for packing, H in (((64, 3, "affine"), 64), ((32, 8, "affine"), 320))],
    *[(packing, (2, 8, 2, H, H)) for packing, H in (((64, 3, "affine"), 64), ((32, 8, "mxfp8"), 32))],
    *[((16, 4, "nvfp4"), (2, B, 2, 48, 48)) for B in (1, 8)],
    *[(packing, (2, 1, 2, 32, 32)) for packing in ((32, 4, "mxfp4"), (32, 1, "affine"))],
]
# Quantized cases for `fused`: ((group size, bits, mode), (T, B, I, H, P)). In these cases the shader's constant
# SPAN, the number of neighbouring weights that a lane reads, has different values.
FUSED_PACKED = [
    *[((64, 3, "affine"), (2, 1, 2, H, H)) for H in (64, 128, 256)],
    *[((32, bits, "affine"), (2, 17, 2, 32, 32)) for bits in (4, 5)],
    *[((16, 4, "nvfp4"), (2, 1, 2, H, H)) for H in (48, 80, 512)],  # H = 80 and 512 with a plain RNN cell
]
# Cells given as a Python function, with sizes (T, B, I, H). The sizes are such that a threadgroup computes one sequence
# of the batch in some cases and several in others.
POINTWISE = [(cell, (4, 3, 2, 19)) for cell in ("slstm", "zoneout_lstm", "sum_peephole_lstm", "gru", "cifg", "indrnn")]
POINTWISE += [("peephole_lstm", (4, 41, 2, 9)), ("minimal_gru_log", (4, 1, 2, 33))]
# Calls with layer normalisation: (name in norm_cases.CELLS, (B, I, H, P), options). In `fused` a threadgroup has 1 or
# 2 sequences of the batch, and its last simdgroup has lanes without a unit. In `stepwise` a threadgroup of a product
# has 4 sequences; 7 fill the first threadgroup.
NORMS = {
    "fused": [
        ("all", (3, 2, 37, 0), {"lengths": True}),
        ("state", (3, 2, 70, 0), {"cut": Cut(2), "peephole": True}),
        ("gru", (3, 2, 9, 0), {"lengths": True, "bhn": True}),
    ],
    "stepwise": [
        ("all", (7, 2, 9, 0), {"lengths": True}),
        ("state", (7, 2, 9, 5), {}),
        ("state", (3, 2, 300, 5), {"keep": True}),
        ("gru", (3, 2, 9, 0), {"lengths": True, "bhn": True}),
    ],
}
# (function, largest absolute argument). Each function is tested in a cell that applies it to the preactivation. The
# functions use different formulas for small and for large arguments.
FUNCTIONS = [(mx.erf, 6.0), (mx.expm1, 1e-3), (mx.expm1, 2.0), (lambda u: mx.sign(u) + mx.sign(u - u), 1.0)]
BOTH_FORMS = ("cell_lstm", "fused", "fused_arrange")
"""Shader files used by both kinds of products: by lanes and by 8 x 8 matrices."""

OF_OWN_CELLS = ("stepwise_forward", "stepwise_backward", "stepwise_rows", "fused_matrix")
"""Shader files with code that only cells given as a Python function use, besides the files pointwise*.metal."""

BARRIERS = [file for file in USERS if "_barrier(" in kernels.shader_file(file)]
QUICK = ("stepwise_lanes",)
"""The files whose barriers the default tests remove. For each other file with barriers a slow test removes them."""

# Damages that change no result, so that no test can notice them. The comment above an entry, or above several entries,
# gives the reason.
HARMLESS = {
    # The distance is a power of two, so it is never 31. The loops below it advance by 2 to an even bound.
    "UNROLL for (int distance = EVERY; distance < 32; distance *= 2) value += simd_shuffle_xor(value, "
    "ushort(distance));"
    "  the bound of < is one less",
    "UNROLL for (int r = 0; r < ROWS; r += 2)  the bound of < is one less",
    "UNROLL for (int n = 0; n < P::TURNS * ROWS; n += 2) {  the bound of < is one less",
    # The loop reads the gates that product_gradient needs. That is the first gate, r, of a GRU.
    "for (int gate = 0; gate < GATES; ++gate)  the bound of < is one less",
    # With >=, h is also read where there is no product, but then nothing uses it. So the result is the same.
    "if (product_length(s, a) > 0) operands_at<1>(row, j, h);  > becomes >=",
    # The gradient of c in a lane without a unit: the lane counts 0 in norms and writes nothing. So nothing reads it.
    "UNROLL for (int k = 0; k <= Cell::CARRIED; ++k) item.ds[k] = real ? item.ds[k] : 0.0f;  <= becomes <",
    # With >=, ds[0] of a cell without c changes, too. `pass_to_h_before` sets it anew before anything reads it.
    "if (C > 0) items[r].ds[C] = live ? factor * dc[r] : items[r].ds[C];  > becomes >=",
    # dc[0] is 0: h has its cotangent in dh.
    "if (k > 0) ds[k] += dc[k];  > becomes >=",
    # If both numbers are equal, both branches of ?: give the same.
    "template <class Cell> constant constexpr int VALUES = Cell::GATES > Cell::KEPT ? int(Cell::GATES) : "
    "int(Cell::KEPT);  > becomes >=",
    # p[4] is the forget bias, which the next line sets. The block of a gate has two bits, so also the read for gate 4
    # stays in the array.
    "for (int gate = 0; gate < 4; ++gate)  < becomes <=",
    # The loop copies N numbers, 4 per pass, and N is a multiple of 4. With the bound N - 1 it has the same passes: e =
    # 0, 4, ..., N - 4.
    "UNROLL for (int e = 0; e < N; e += 4) {  the bound of < is one less",
    # With the smaller bound, this loop leaves out some of the last numbers, but the next loop adds all that are left.
    # So the sum has the same terms.
    "for (; k + 3 < length; k += 128) accumulate<4>(rows, columns, 128, partial);  the bound of < is one less",
    # `left` counts the terms of a product that are still to be added: the loop adds TURN terms per pass, the code
    # behind `if` adds the rest. After the first two changes the rest may be TURN terms, after the third 0 terms. So the
    # sum is the same.
    "for (; left >= TURN; left -= TURN) {  >= becomes >",
    "for (; left >= TURN; left -= TURN) {  the bound of >= is one more",
    "if (left > 0) {  > becomes >=",
    # The loop copies OWN rows, four per pass, and skips rows from OWN on. With `part <= OWN` there may be one more
    # pass, which skips all its rows. With `part < OWN - 1` there are the same passes, because OWN - 1 is not a multiple
    # of 4. So the copied rows are the same.
    "UNROLL for (int part = 0; part < OWN; part += 4) {  < becomes <=",
    "UNROLL for (int part = 0; part < OWN; part += 4) {  the bound of < is one less",
    # With >=, the block also runs for one slice. Its inner loop begins at slice 1, which does not exist, so it adds
    # nothing and the sums stay the same.
    "if constexpr (SLICES > 1) {  > becomes >=",
    # The loop looks for the array that holds row `m`. starts[n] is the first row of array n. With <=, the loop also
    # compares `m` with starts[20], the number of all rows. `m` is always below it, so the loop finds the same array.
    "UNROLL for (int n = 1; n < 20; ++n) {  < becomes <=",
    # Weights with an index n below RESIDENT are in registers. With the bound RESIDENT - 1, the last of these weights is
    # read from memory instead. It has the same value there, so the product is the same.
    "if (n < RESIDENT) weights = float4(resident[n]);  the bound of < is one less",
    # `sums` also has room for the products of other units, which nothing reads any more: with <= GATES the loop writes
    # one of them.
    "UNROLL for (int k = 0; k < LANES && LANES * j + k < GATES && !Lanes<Cell>::SCATTERS; ++k)  < becomes <=",
    # No lane of a unit has the number LANES.
    "UNROLL for (int k = 1; k < LANES && !Lanes<Cell>::SCATTERS; ++k)  < becomes <=",
    # In this branch `lane` is never equal to GATE_N, so > and >= choose the same block.
    "return lane == Cell::GATE_N ? -1 : Cell::block(lane > Cell::GATE_N ? int(Cell::GATE_N) : lane);  > becomes >=",
    # With <=, one more matrix is read, but no product uses it. So the result is the same.
    "if (part + 1 < PARTS) simdgroup_load(right[1], vectors + 64 * (part + 1), 8);  < becomes <=",
    # With <=, the loop also looks at the activation of the output, which follows those of the gates. At worst the
    # kernel then runs the slower code that computes gates one by one. This code gives the same result.
    "UNROLL for (int n = 0; n < GATES; ++n) found = found || (activation_of(OPTIONS, n) == TANH && gate == n);"
    "  < becomes <=",
    # Only cells with four lanes per unit call this function. So N is 4, and both conditions are true.
    "float of_lane(float mine, int n) { return N > 1 ? quad_broadcast(mine, ushort(n)) : mine; }  > becomes >=",
    # P is the number of recurrent products of a cell. With `P >= 0` instead of `P > 0`, cells without a product (P = 0)
    # also wait at the barriers and run the code that adds the products. There is no term to add, so the result is the
    # same.
    "if constexpr (P > 0) threadgroup_barrier(mem_flags::mem_threadgroup);  > becomes >=",
    "if constexpr (P > 0) {  > becomes >=",
    # After the end of a sequence (`live` is false) these loops write 0 instead of the values that a step saves. With a
    # smaller bound a loop leaves out the last value. The backward pass reads no value after the end, so the gradients
    # are the same.
    "UNROLL for (int j = 0; j < REGISTERS_OF<Cell::KEPT, LANES>; ++j) y[j] = live ? y[j] : 0.0f;"
    "  the bound of < is one less",
    # A lane whose block index LANES * j + lane is too large loads the last block, COUNT - 1. With the bound COUNT - 1
    # the condition changes only for the index COUNT - 1. Both branches of ?: then give block COUNT - 1.
    "const int block = COUNT % LANES == 0 || LANES * j + lane < COUNT ? LANES * j + lane : COUNT - 1;"
    "  the bound of < is one less",
    # These functions (exp(x) - 1 and erf) use a series for small x and another formula for larger x. With <= they use
    # the series at the limit itself, where both formulas are precise enough. One more or one less term of the series
    # changes the result by less than a rounding error.
    "return x * x < 0.04f ? near : exp(x) - 1.0f;  < becomes <=",
    "return copysign(t < 1.0f ? 1.12837917f * t * near : 1.0f - exp(-s) * 0.564189584f / (t + far), x);  < becomes <=",
    "for (int n = 0; n < 12; ++n) near += term / float(2 * n + 1), term *= -s / float(n + 1);  < becomes <=",
    "for (int n = 0; n < 12; ++n) near += term / float(2 * n + 1), term *= -s / float(n + 1);"
    "  the bound of < is one less",
    # With <=, the loop also adds up the number in `sums` that follows the products of this unit. This number belongs to
    # another unit, and nothing here uses the sum. So the result is the same.
    "UNROLL for (int n = 0; n < Cell::PRODUCTS; ++n) sums[n] = sum_over_lanes<Lanes<Cell>::LANES>(sums[n]);"
    "  < becomes <=",
    # For tanh the function `squash` returns the formula `near` if z = x * x < 0.3, otherwise the formula `far`. With <=
    # it returns `near` at z = 0.3, where both are precise enough. The second change concerns only power = 126: both
    # branches of ?: then give 126.
    "return is_tanh && z < 0.3f ? near : far;  < becomes <=",
    "const float y = fast::divide(1.0f, 1.0f + exp2(power > 126.0f ? 126.0f : power));  > becomes >=",
    # The changes matter only if x equals the bound. Both branches then return the bound, so the result is the same.
    "case RELU: return x < 0.0f ? 0.0f : x;  < becomes <=",
    "inline float within(float least, float x, float most) { return x < least ? least : x > most ? most : x; }"
    "  < becomes <=",
    "inline float within(float least, float x, float most) { return x < least ? least : x > most ? most : x; }"
    "  > becomes >=",
    # The kernel collects the h that each step multiplies by Wh, and 0 for steps after the end of a sequence. With <=,
    # the first step after the end gets the sequence's last h instead of 0. The gradient of Wh multiplies this h by a
    # gradient of 0, so the gradient of Wh is the same.
    "if (t < length) {  < becomes <=",
    # In these conditions the index and the bound (COUNT or K) are multiples of the same number, which is more than 1.
    # So a bound that is smaller by one changes nothing. With `k <= K` the loop runs once more, at k = K, but no lane
    # has a weight there, and the product is the same.
    "UNROLL for (int first = 0; first < COUNT; first += AT_ONCE) {  the bound of < is one less",
    "for (uint k = 0; k < uint(K); k += 8 * COUNT) {  < becomes <=",
    "for (uint k = 0; k < uint(K); k += 8 * COUNT) {  the bound of < is one less",
    "if (k + first < uint(K)) multiply(rows, weights, columns, place, part);  the bound of < is one less",
    # With <=, a shift by 0 goes to the right instead of to the left. The result is the same.
    "inline uint shifted(uint bits, int left) { return left < 0 ? bits >> -left : bits << left; }  < becomes <=",
    # With >=, bits of the next word are added, too, but a later mask removes them. So the weight is the same.
    "if (shift + BITS > 32) bits |= words[word + 1] << (32 - shift);  > becomes >=",
    # PIECE is the smaller one of SPAN and SIZE, two powers of two. If SPAN = SIZE, both branches of ?: give the same
    # number. If not, the changed conditions are true for the same sizes as SPAN < SIZE. So PIECE is always the same.
    "PIECE = SPAN < SIZE ? SPAN : SIZE,  < becomes <=",
    "PIECE = SPAN < SIZE ? SPAN : SIZE,  the bound of < is one less",
    # A lane's words are first weights (factor < 0), then scales and biases (factor = 0, 1, ...). With `factor <= 0` the
    # slot of the first scale is computed by the formula for weights. Both formulas give slot 0 for it, so the result is
    # the same.
    "const int slot = factor < 0 ? place / Share::WORDS % SLOTS : factor / Share::FACTORS;  < becomes <=",
    # Words with an index n below RESIDENT are in registers. With the bound RESIDENT - 1, the last of these words is
    # read from memory instead. It has the same value there, so the product is the same.
    "if (n < RESIDENT) lane.words = lane.resident[n].words;  the bound of < is one less",
    # If a quantization group has more than 16 weights, several lanes share it: its first lane (the leader) loads the
    # scale and sends it to the others. With >=, groups of 16 run this code, too. There each lane is its own leader and
    # sends the scale to itself, so nothing changes.
    "if constexpr (GROUP > 16) {  > becomes >=",
    # The line computes dh at the time step s.t if this step is before the end of the sequence. With <=, it also
    # computes dh at the first step after the end. Nothing reads this dh, so the gradients are the same.
    "if (s.n < 0 || s.t < length) sum = dh_sum<Cell>(s, a, sums + cell, length, b, j, P);  < becomes <=",
}

ENDLESS = {
    "  UNROLL for (int n = 0; n < OWN; ++n) {  < becomes <=",
    "  UNROLL for (int r = 0; r < ROWS; ++r) {  < becomes <=",
}
"""Damages of stepwise_lanes.metal that are not tried: lines with their indentation, and the change. A damaged loop
writes past an array of registers. In the emulator it then overwrites its own counter and never ends."""


def change_of(line, what):
    """Return a line of a shader without its comment, with its indentation, and what changes in it."""
    return f"{line.partition('//')[0].rstrip()}  {what}"


def changed_line(file, mutation):
    """Return the line of a shader file that a mutation changes, and a description of the change, as `change_of`."""
    line = kernels.shader_file(file).splitlines()[mutation.line - 1]
    return change_of(line, mutation.description.partition(": ")[2])


def damages(file, kind):
    """Yield changed versions of a shader file, each with one change. With kind "barriers" a barrier is changed.
    Otherwise the limit in a comparison of indices is moved by one. Changes in ENDLESS are left out."""
    for mutation in mutations.mutations(kernels.shader_file(file)):
        if file == "stepwise_lanes" and changed_line(file, mutation) in ENDLESS:
            continue
        if ("barrier" in mutation.description) == (kind == "barriers") and "index" not in mutation.description:
            yield mutation


def trials(file, kind):
    """Yield the arguments of `notice`, one tuple per small test case: (engine, case, cotangents, exact results, error
    bounds) and, if the shader file needs them, quantized weights. The cases have all options for which the shader
    compares an index with a limit, such as `lengths`, because the tests damage these comparisons."""
    users, batches = USERS[file]
    batches = batches[:1] if kind == "barriers" else batches
    for engine, layer in ((word, layer) for word, layers in users.items() for layer in layers):
        for B in batches:
            for way in ({}, {"reverse": True}):
                options = {"mask": (4, B, "P"), "lengths": np.arange(B) % 5, **LAYERS[layer], **way}
                yield trial(engine, (4, B, 2, 10, 33), **options)
        options = {name: value for name, value in LAYERS[layer].items() if name in ("op", "reset")}
        yield trial(engine, (2, batches[-1], 2, 33, 33), bidirectional=engine == "fused", **options)
        if file == "fused_backward":
            yield trial(engine, (4, 3, 2, 10, 10), keep=True, **options)
    if file == "stepwise_tiles":
        yield trial("stepwise", (2, 9, 2, 32, 32))  # products of 32 and 128 terms: the last four matrices are full
        # H = P = 130: a product has more terms than the 128 of one loop pass. B = 33: three SIMD groups of a
        # threadgroup compute 11 batch rows each.
        yield trial("stepwise", (2, 33, 2, 130, 130), op="gru")
    if file in ("quantized", "stepwise_tiles", "stepwise_quantized", "fused_quantized", "fused_arrange"):
        for packing, sizes in FUSED_PACKED if "fused" in file else PACKED:
            op = "rnn" if sizes[3] in (80, 512) else "lstm"
            case, cotangents, weights, ref, limit = quantized_case(packing, sizes=sizes, quantize=("Wh",), op=op)
            yield "fused" if "fused" in file else "stepwise", case, cotangents, ref, limit, weights
    if file in ("fused_norm", "fused_norm_own", "stepwise_norm"):
        for path in PATHS.values():
            if "norm" in path.options and path.engine == next(iter(users)):
                yield "path", path, OwnJudge(case_of(path)), None, None
    # stepwise_rows also copies the gradients that only a cell with norms has.
    if file == "stepwise_rows" or ("norm" in file and file != "fused_norm_own"):
        for engine in users if file != "norm" else NORMS:
            for name, sizes, options in NORMS[engine]:
                yield "norm", engine, NORMED[name], sizes, options
    if "pointwise" in file or (file in OF_OWN_CELLS and kind == "bounds"):
        # In the additional case for `stepwise`, 8 sequences and 8 units fill the only tile of a step. In the other
        # cases a tile extends past the last sequence or unit, so some threads are left out.
        for cell, sizes in [*POINTWISE, *([("cifg", (2, 8, 2, 8))] if "stepwise" in file else [])]:
            for options in ({"lengths": True, "keep": True, "mask": True}, {"lengths": True, "reverse": True}):
                case, cotangents = draw_smooth(np.random.default_rng(3), ZOO[cell], options, sizes)
                yield "pointwise", ZOO[cell], case, cotangents, *judged(ZOO[cell], case, cotangents)
    if file == "pointwise":
        for function, most in FUNCTIONS:
            form = Form(lambda a, state, function=function: (function(a[0]) + 0.1 * state[0],), 1, recurrent=False)
            case, cotangents = draw_arrays(np.random.default_rng(3), form, {"b": None, "Wx": None}, (3, 1, 1, 33))
            case["x"] = np.linspace(-most, most, 99, dtype=np.float32).astype(np.float64).reshape(3, 1, 33)
            yield "pointwise", form, case, cotangents, *judged(form, case, cotangents)
    if file == "recurrent_input":
        # Without a mask the kernel also copies x. A thread copies several numbers of x, because I > H.
        yield trial("fused", (4, 3, 5, 2, 2), lengths=np.array([2, 4, 3]), mask=None)
    if file == "stepwise":
        yield trial("stepwise", (21, 1, 2, 2, 2), op="rnn")  # concatenates rows of fewer than 8 numbers
        # A mask of 4 numbers: Metal binds an array of so few numbers as `constant`.
        yield trial("stepwise", (2, 1, 2, 4, 4), op="rnn", mask=(1, 1, "P"))
    if file == "stepwise_lanes":
        yield trial("stepwise", (2, 3, 2, 7, 7))  # H = 7: three elements remain after the vectors of 4
    if file == "stepwise_rows":
        for T in (20, 21, 36):  # launches concatenate no array, 2 arrays, or as many as they may
            yield trial("stepwise", (T, 3, 2, 5, 5), op="rnn")
    if file == "fused_lanes":
        # The kernel has two paths. If all activations are sigmoid or tanh, all gates share one exp2 and one reciprocal.
        # With relu as the last gate's activation they do not.
        for last in ("relu", "tanh"):
            yield trial("fused", (3, 3, 2, 5, 5), activations=("sigmoid", "sigmoid", "tanh", last, "tanh"))
    if file == "fused_matrix":
        yield trial("fused", (3, 9, 2, 5, 5))  # H = 5 fits in one part of 8, so no registers hold a second part
    if file == "fused":
        yield trial("fused", (4, 3, 2, 10, 10), h0=None, c0=None)
    if file == "cell":
        kinks = ("hard_sigmoid", "relu", "tanh", "hard_sigmoid", "relu")
        yield trial("stepwise", (3, 3, 2, 20, 20), activations=kinks, forget_bias=1.5)
        yield trial("stepwise", (3, 3, 2, 5, 5), elementwise_bounds, scale=1e-4, op="rnn")  # tanh of arguments near 0


def trial(engine, sizes, bounds=bounds, scale=1, **options):
    rng = np.random.default_rng(1)
    case = draw(rng, sizes=sizes, dtype=np.float32, **options)
    case |= {name: case[name] * np.float32(scale) for name in ("x", "b", "h0") if case.get(name) is not None}
    cotangents = draw_cotangents(rng, forward(**case), np.float32)
    ref, limit = judge(case, np.float32, cotangents)
    if "lengths" in options:
        spoilt = (cotangents[name] for name in ("h", "c", "gates") if name in cotangents)
        for array in (case["x"], *([case["mask"]] if options["mask"] else []), *spoilt):
            array[np.arange(sizes[0])[:, None] >= options["lengths"]] = np.nan
    return engine, case, cotangents, ref, limit


def notice_pointwise(engine, form, case, cotangents, exact, limit):
    """Compute a test case with a cell that is given as a Python function. The kernels come from the current, damaged
    shaders. Raise an error if a result is wrong; the emulator also raises an error for a defect of the kernel."""
    with on_metal(order="random", seed=1), limited(launch_steps=3):
        assert_right(run_cell(form, case, cotangents, by_pointwise(engine)), exact, limit)


def notice(file, engine, case, cotangents, ref, limit, weights=MappingProxyType({})):
    """Compute a test case with the current, damaged shaders. Raise an error if a result is wrong, or if NaN from
    the padding after the end of a sequence reaches a result. The emulator also raises an error for a defect of
    the kernel."""
    if engine == "norm":
        return check_norm(case, cotangents, ref, limit)
    if engine == "path":
        with on_metal(), limited(**case.limits):
            assert cotangents.verdict(library(cotangents.case, case.engine)) == "right"
        return
    if engine == "pointwise":
        with matrices_from(1 if "matrix" in file else 1000):
            notice_pointwise("stepwise" if "stepwise" in file else "fused", case, cotangents, ref, limit, weights)
        return
    with (
        on_metal(),
        limited(launch_steps=3),
        # So many working registers leave room for only a few weights. The kernel reads the other weights from memory,
        # so that both ways are tested.
        patch.object(kernels_fused, "working_registers", lambda *_: 108),
        matrices_from(1 if "matrix" in file else 10 if file in BOTH_FORMS else 100),
        # With a limit of 1 byte, the backward kernel with matrix products has a single buffer and one more barrier.
        # Otherwise it has a double buffer.
        patch.object(kernels_fused, "THREADGROUP_BYTES", 1 if case.get("reverse") else 32768),
    ):
        outputs, gradients = run(case, engine, np.float32, cotangents, weights)
        for name, value in (outputs | gradients).items():
            assert_within(name, value, ref[name], limit[name])


def unnoticed(file, kind):
    """Damage a shader file in each place of a kind, but for the damages in HARMLESS. Return the changed lines whose
    damage no trial notices.

    One text of the file contains all damages, and one is chosen when a kernel runs, so that a kernel is compiled once.
    A text with a single damage is compiled for lines with `constexpr`, on which types and constants depend, and for a
    damage that nothing has noticed: the compiler may see that it is one, such as an index outside of an array. The
    trial that noticed the last damage goes first: often it notices the next one, too."""
    prepared, original, missed = list(trials(file, kind)), kernels.shader_file, set()
    sound = set()  # the trials that were found to pass without a damage, by `id`

    def noticed(text, number):
        for n, arguments in enumerate(prepared):
            if id(arguments) not in sound:
                assert not notices(file, arguments, every, 0), "a trial fails without a damage"
                sound.add(id(arguments))
            if notices(file, arguments, text, number):
                prepared.insert(0, prepared.pop(n))
                return True
        return False

    wanted = {each.description: each for each in damages(file, kind)}
    lines = {what: changed_line(file, mutation).strip() for what, mutation in wanted.items()}
    wanted = {what: mutation for what, mutation in wanted.items() if lines[what] not in HARMLESS}
    chosen_in = {mutation.line for what, mutation in wanted.items() if "constexpr" not in lines[what]}
    every, described = mutations.with_choice(original(file), chosen_in)
    numbers = {what: number for number, what in described.items()}
    for what, mutation in wanted.items():
        if not (what in numbers and noticed(every, numbers[what])) and not noticed(mutation.text, 0):
            missed.add(lines[what])
    return missed


def notices(file, arguments, text, number):
    """Return whether a trial notices the damage of this number (0: none) in a text of the shader file."""
    original = kernels.shader_file
    replaced = lambda name: text if name == file else original(name)  # noqa: E731
    with patch.object(kernels, "shader_file", replaced), coverage.set_aside(), mutations.chosen(number):
        try:
            notice(file, *arguments)
        except (KernelError, AssertionError):
            return True
    return False


# Damages that `mutations` does not make: {description: (shader file, a part of the file's source, the replacement, a
# function that returns the arguments of `notice`)}.
PLANTED = {
    # The last step of a launch has no next step whose numbers it may read.
    "fused backward reads gates before the first step": (
        *("fused_backward", "distance_to_next(ahead != n,", "distance_to_next(true,"),
        lambda: trial("fused", (3, 3, 2, 5, 5)),
    ),
    "fused backward reads a state before the first step": (
        *("fused_backward", "max(n - 1, sweep.start)", "n - 1"),
        lambda: trial("fused", (3, 3, 2, 5, 5)),
    ),
    "fused backward with matrices reads gates before the first step": (
        *("fused_matrix", "distance_to_next(ahead != n,", "distance_to_next(true,"),
        lambda: trial("fused", (3, 9, 2, 5, 5)),
    ),
    "fused backward with matrices reads a state before the first step": (
        *("fused_matrix", "max(n - 1, sweep.start)", "n - 1"),
        lambda: trial("fused", (3, 9, 2, 5, 5)),
    ),
    "every group joins the first one's part": (
        *("stepwise_rows", "(group.x - a.first[0]) * a.first[1] + ", ""),
        lambda: trial("stepwise", (30, 9, 2, 15, 15), op="rnn"),
    ),
    "sigmoid through tanh": (
        *("cell", "2.0f * y - 1.0f : y;", "2.0f * y - 1.0f : 0.5f + 0.5f * (2.0f * y - 1.0f);"),
        lambda: trial("fused", (3, 3, 2, 5, 5), elementwise_bounds, forget_bias=-20.0),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("file, sound, damaged, prepare", PLANTED.values(), ids=PLANTED)
def test_planted_damage_is_noticed(file, sound, damaged, prepare):
    arguments, original = prepare(), kernels.shader_file
    notice(file, *arguments)
    assert original(file).count(sound) == 1
    replaced = patch.object(kernels, "shader_file", lambda name: original(name).replace(sound, damaged))
    with replaced, coverage.set_aside(), pytest.raises((KernelError, AssertionError)) as noticed:
        notice(file, *arguments)
    assert "[compile]" not in str(noticed.value)


def test_every_shader_with_a_bound_or_a_barrier_is_damaged():
    files = sorted(path.stem for path in shader_folder().glob("*.metal"))
    assert {file for file in files if any(damages(file, "bounds")) or any(damages(file, "barriers"))} == set(USERS)


def test_every_damage_of_the_lists_can_be_made():
    """Each entry of HARMLESS (changes that change no result) and of ENDLESS (changes that are not tried) names a line
    that a shader has and a change of this line that `mutations` makes."""
    made = set()
    for file in USERS:
        made |= {changed_line(file, mutation).strip() for mutation in damages(file, "bounds")}
    assert made >= HARMLESS
    all_of_file = mutations.mutations(kernels.shader_file("stepwise_lanes"))
    assert {changed_line("stepwise_lanes", mutation) for mutation in all_of_file} >= ENDLESS


@pytest.mark.parametrize(
    "file", [pytest.param(file, marks=[] if file in QUICK else pytest.mark.slow) for file in BARRIERS]
)
def test_every_barrier_is_needed(file):
    assert unnoticed(file, "barriers") == set()


@pytest.mark.slow
@pytest.mark.parametrize("file", USERS)
def test_every_bound_is_exact(file):
    assert unnoticed(file, "bounds") == set()
