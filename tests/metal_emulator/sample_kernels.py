"""Correct kernels, for which the emulator must report nothing. Other modules change them in one place to plant a
bug, which the emulator must report (planted_run_bugs.py, planted_language_bugs.py).

Each kernel is the source that the library would pass to `mx.fast.metal_kernel`. A NumPy function next to it computes
the same result.
"""

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
SIMD_BARRIER = "simdgroup_barrier(mem_flags::mem_threadgroup);"


@dataclass
class Sample:
    """A kernel with its inputs and sizes. arrays: float32 values, converted to `dtype` unless `keep_types`;
    template: the template's values besides T."""

    source: str
    arrays: list[np.ndarray]
    output_shapes: list[tuple[int, ...]]
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    header: str = ""
    dtype: mx.Dtype = mx.float32
    template: list[tuple[str, Any]] = field(default_factory=list)
    input_names: list[str] | None = None
    output_names: list[str] | None = None
    init_value: float | None = None
    atomic_outputs: bool = False
    keep_types: bool = False

    def build(self):
        """Return the object that `mx.fast.metal_kernel` makes from this sample's source and names."""
        names = self.input_names or [f"a{i}" for i in range(len(self.arrays))]
        outputs = self.output_names or [f"o{i}" for i in range(len(self.output_shapes))]
        return mx.fast.metal_kernel(
            name="sample",
            input_names=names,
            output_names=outputs,
            source=self.source,
            header=self.header,
            atomic_outputs=self.atomic_outputs,
        )

    def run(self) -> list[np.ndarray]:
        """Launch the kernel and return the outputs as float32."""
        inputs = [mx.array(a) if self.keep_types else mx.array(a).astype(self.dtype) for a in self.arrays]
        outputs = self.build()(
            inputs=inputs,
            template=[("T", self.dtype), *self.template],
            grid=self.grid,
            threadgroup=self.threadgroup,
            output_shapes=self.output_shapes,
            output_dtypes=[self.dtype] * len(self.output_shapes),
            init_value=self.init_value,
            stream=mx.cpu,
        )
        return [np.array(o.astype(mx.float32)) for o in outputs]


def random(*shape: int, seed: int = 0) -> np.ndarray:
    """Return random float32 values with a standard normal distribution."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def sigmoid(x: np.ndarray) -> np.ndarray:
    """Return 1 / (1 + exp(-x))."""
    return 1 / (1 + np.exp(-x))


# ---- out[i] = x[i] * scale[0] + 1
ELEMENTWISE = """
const uint i = thread_position_in_grid.x;
if (i >= uint(x_shape[0])) return;
out[i] = static_cast<T>(float(x[i]) * float(scale[0]) + 1.0f);
"""


def elementwise(size: int = 100, dtype: mx.Dtype = mx.float32) -> Sample:
    """Return a kernel with one thread per element; its scale is in `constant` memory."""
    arrays = [random(size), np.array([2.0], np.float32)]
    grid = (-(-size // 32) * 32, 1, 1)
    sample = Sample(ELEMENTWISE, arrays, [(size,)], grid, (32, 1, 1), dtype=dtype)
    sample.input_names, sample.output_names = ["x", "scale"], ["out"]
    return sample


# ---- one LSTM step on preactivations z [N, 4H], gate order i f g o
LSTM_MATH = """
#include <metal_stdlib>
using namespace metal;
enum Gate { input_gate, forget_gate, cell_gate, output_gate };
struct Gates { float i, f, g, o; };
inline float sigmoid(float x) { return 1.0f / (1.0f + metal::precise::exp(-x)); }
inline Gates activate(float4 z) {
  return Gates{sigmoid(z.x), sigmoid(z.y), metal::precise::tanh(z.z), sigmoid(z.w)};
}
template <typename P> inline float4 load_gates(P z, uint row, uint j, uint H) {
  return float4(float(z[row * 4 * H + input_gate * H + j]), float(z[row * 4 * H + forget_gate * H + j]),
                float(z[row * 4 * H + cell_gate * H + j]), float(z[row * 4 * H + output_gate * H + j]));
}
"""
POINTWISE_FORWARD = """
const uint j = thread_position_in_grid.x, n = thread_position_in_grid.y;
const uint H = uint(c_shape[1]);
if (j >= H) return;
const Gates a = activate(load_gates(z, n, j, H));
const float cell = a.f * float(c[n * H + j]) + a.i * a.g;
c_out[n * H + j] = static_cast<T>(cell);
h_out[n * H + j] = static_cast<T>(a.o * metal::precise::tanh(cell));
"""
POINTWISE_BACKWARD = """
const uint j = thread_position_in_grid.x, n = thread_position_in_grid.y;
const uint H = uint(c_shape[1]);
if (j >= H) return;
const Gates a = activate(load_gates(z, n, j, H));
const float c_old = float(c[n * H + j]);
const float t = metal::precise::tanh(a.f * c_old + a.i * a.g);
const float dh_in = float(dh[n * H + j]);
const float dc = float(dc_in[n * H + j]) + dh_in * a.o * (1.0f - t * t);
const uint base = n * 4 * H + j;
dz[base] = static_cast<T>(dc * a.g * a.i * (1.0f - a.i));
dz[base + H] = static_cast<T>(dc * c_old * a.f * (1.0f - a.f));
dz[base + 2 * H] = static_cast<T>(dc * a.i * (1.0f - a.g * a.g));
dz[base + 3 * H] = static_cast<T>(dh_in * t * a.o * (1.0f - a.o));
dc_out[n * H + j] = static_cast<T>(dc * a.f);
"""


def pointwise_forward(N: int = 3, H: int = 40, dtype: mx.Dtype = mx.float32) -> Sample:
    """Return a kernel for one LSTM step that gets the preactivations, so that it computes no matrix product. The
    grid is (H, N): one thread per hidden unit and batch row."""
    sample = Sample(
        POINTWISE_FORWARD, [random(N, 4 * H), random(N, H, seed=1)], [(N, H), (N, H)], (64, N, 1), (32, 1, 1)
    )
    sample.header, sample.dtype = LSTM_MATH, dtype
    sample.input_names, sample.output_names = ["z", "c"], ["h_out", "c_out"]
    return sample


def pointwise_backward(N: int = 3, H: int = 40, dtype: mx.Dtype = mx.float32) -> Sample:
    """Return a kernel for the gradients of one LSTM step with respect to z and c."""
    arrays = [random(N, 4 * H), *(random(N, H, seed=s) for s in (1, 2, 3))]
    sample = Sample(POINTWISE_BACKWARD, arrays, [(N, 4 * H), (N, H)], (64, N, 1), (32, 1, 1))
    sample.header, sample.dtype = LSTM_MATH, dtype
    sample.input_names, sample.output_names = ["z", "c", "dh", "dc_in"], ["dz", "dc_out"]
    return sample


def pointwise_forward_equation(z: np.ndarray, c: np.ndarray) -> list[np.ndarray]:
    """Return h and c of one LSTM step, computed by NumPy."""
    i, f, g, o = np.split(z.astype(np.float64), 4, axis=-1)
    cell = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
    return [sigmoid(o) * np.tanh(cell), cell]


def pointwise_backward_equation(z, c, dh, dc_in) -> list[np.ndarray]:
    """Return dz and dc of one LSTM step, computed by NumPy."""
    i, f, g, o = np.split(z.astype(np.float64), 4, axis=-1)
    i, f, g, o = sigmoid(i), sigmoid(f), np.tanh(g), sigmoid(o)
    t = np.tanh(f * c + i * g)
    dc = dc_in + dh * o * (1 - t * t)
    dz = [dc * g * i * (1 - i), dc * c * f * (1 - f), dc * i * (1 - g * g), dh * t * o * (1 - o)]
    return [np.concatenate(dz, axis=-1), dc * f]


# ---- An LSTM over the whole sequence in one launch. R: recurrent weights [4H, H]. Each threadgroup computes 8
# sequences of the batch and keeps their h and c in threadgroup memory.
PERSISTENT = """
const uint tid = thread_index_in_threadgroup, lane = thread_index_in_simdgroup, sg = simdgroup_index_in_threadgroup;
const uint row0 = threadgroup_position_in_grid.x * 8;
const int steps = z_shape[0];
const uint N = uint(z_shape[1]);
constexpr uint BLOCKS = (H / 8 + SG - 1) / SG;
threadgroup T h_tile[8 * H];
threadgroup float c_tile[8 * H], scratch[SG * 4 * 64];
for (uint k = tid; k < 8 * H; k += 32 * SG) h_tile[k] = h0[row0 * H + k];
for (uint k = tid; k < 8 * H; k += 32 * SG) c_tile[k] = float(c0[row0 * H + k]);
threadgroup_barrier(mem_flags::mem_threadgroup);
for (int t = 0; t < steps; ++t) {
  const device T* zt = z + (ulong(t) * N + row0) * (4 * H);
  float h_new[BLOCKS][2];
  for (uint b = 0; b < BLOCKS; ++b) {
    const uint block = sg + b * SG;
    if (block >= uint(H / 8)) continue;
    simdgroup_matrix<float, 8, 8> acc[4];
    for (uint q = 0; q < 4; ++q) acc[q] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    for (uint k = 0; k < uint(H); k += 8) {
      simdgroup_matrix<T, 8, 8> left, right;
      simdgroup_load(left, h_tile + k, H);
      for (uint q = 0; q < 4; ++q) {
        simdgroup_load(right, R + (q * H + block * 8) * H + k, H, ulong2(0, 0), true);
        simdgroup_multiply_accumulate(acc[q], left, right, acc[q]);
      }
    }
    threadgroup float* own = scratch + sg * 256;
    for (uint q = 0; q < 4; ++q) simdgroup_store(acc[q], own + q * 64, 8);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    for (uint u = 0; u < 2; ++u) {
      const uint e = lane + u * 32, r = e / 8, j = block * 8 + e % 8;
      float4 pre = load_gates(zt, r, j, uint(H));
      pre += float4(own[e], own[64 + e], own[128 + e], own[192 + e]);
      const Gates a = activate(pre);
      const float cell = a.f * c_tile[r * H + j] + a.i * a.g;
      c_tile[r * H + j] = cell;
      h_new[b][u] = a.o * metal::precise::tanh(cell);
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint b = 0; b < BLOCKS; ++b) {
    const uint block = sg + b * SG;
    if (block >= uint(H / 8)) continue;
    for (uint u = 0; u < 2; ++u) {
      const uint e = lane + u * 32, r = e / 8, j = block * 8 + e % 8;
      h_tile[r * H + j] = static_cast<T>(h_new[b][u]);
      y[(ulong(t) * N + row0 + r) * H + j] = static_cast<T>(h_new[b][u]);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}
for (uint k = tid; k < 8 * H; k += 32 * SG) c_last[row0 * H + k] = static_cast<T>(c_tile[k]);
"""


def persistent(T: int = 3, N: int = 16, H: int = 32, SG: int = 2, dtype: mx.Dtype = mx.float32) -> Sample:
    """Return a kernel that runs a whole LSTM sequence in one launch, with SG simdgroups per threadgroup. N and H
    must be multiples of 8."""
    arrays = [random(T, N, 4 * H), random(4 * H, H, seed=1) / np.sqrt(H), random(N, H, seed=2), random(N, H, seed=3)]
    sample = Sample(PERSISTENT, arrays, [(T, N, H), (N, H)], (32 * SG * (N // 8), 1, 1), (32 * SG, 1, 1))
    sample.header = LSTM_MATH + "#include <metal_simdgroup_matrix>\n"
    sample.dtype, sample.template = dtype, [("H", H), ("SG", SG)]
    sample.input_names, sample.output_names = ["z", "R", "h0", "c0"], ["y", "c_last"]
    return sample


def persistent_equation(z, R, h, c) -> list[np.ndarray]:
    """Return h of all steps and the last c of an LSTM, computed by NumPy."""
    rows = []
    for step in z.astype(np.float64):
        h, c = pointwise_forward_equation(step + h @ R.T.astype(np.float64), c)
        rows.append(h)
    return [np.stack(rows), c]


# ---- C = A B, one simdgroup per 8x8 tile
MATMUL = """
const uint row = threadgroup_position_in_grid.y * 8, column = threadgroup_position_in_grid.x * 8;
simdgroup_matrix<float, 8, 8> acc(0.0f);
for (uint k = 0; k < uint(K); k += 8) {
  simdgroup_matrix<T, 8, 8> left, right;
  simdgroup_load(left, A + row * K + k, K);
  simdgroup_load(right, B + k * N + column, N);
  simdgroup_multiply_accumulate(acc, left, right, acc);
}
simdgroup_matrix<T, 8, 8> result;
result.thread_elements()[0] = static_cast<T>(acc.thread_elements()[0]);
result.thread_elements()[1] = static_cast<T>(acc.thread_elements()[1]);
simdgroup_store(result, C + row * N + column, N);
"""


def matmul(M: int = 16, N: int = 24, K: int = 40, dtype: mx.Dtype = mx.float32) -> Sample:
    """Return a kernel for the product of two matrices. M, N and K must be multiples of 8."""
    sample = Sample(MATMUL, [random(M, K), random(K, N, seed=1)], [(M, N)], (32 * (N // 8), M // 8, 1), (32, 1, 1))
    sample.header = "#include <metal_simdgroup_matrix>\nusing namespace metal;\n"
    sample.dtype, sample.template = dtype, [("K", K), ("N", N)]
    sample.input_names, sample.output_names = ["A", "B"], ["C"]
    return sample


# ---- sums of the rows of x [rows, width]: simdgroup sums, combined through threadgroup memory
ROW_SUMS = """
const uint row = threadgroup_position_in_grid.x, tid = thread_index_in_threadgroup;
const uint lane = thread_index_in_simdgroup, sg = simdgroup_index_in_threadgroup;
threadgroup float partial[SG];
float sum = 0.0f;
for (uint k = tid; k < uint(W); k += 32 * SG) sum += float(x[row * W + k]);
sum = simd_sum(sum);
if (lane == 0) partial[sg] = sum;
threadgroup_barrier(mem_flags::mem_threadgroup);
if (tid == 0) {
  float total = 0.0f;
  for (uint s = 0; s < uint(SG); ++s) total += partial[s];
  out[row] = static_cast<T>(total);
}
"""


def row_sums(rows: int = 3, width: int = 100, SG: int = 4, dtype: mx.Dtype = mx.float32) -> Sample:
    """Return a kernel that sums each row, with one threadgroup of SG simdgroups per row."""
    sample = Sample(ROW_SUMS, [random(rows, width)], [(rows,)], (32 * SG * rows, 1, 1), (32 * SG, 1, 1))
    sample.dtype, sample.template = dtype, [("W", width), ("SG", SG)]
    sample.input_names, sample.output_names = ["x"], ["out"]
    return sample
