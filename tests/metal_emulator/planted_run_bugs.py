"""Planted bugs that appear while a kernel runs (the compiler already rejects a few of them)."""

import numpy as np

from . import sample_kernels as samples
from .bug_table import DEVICE_ONLY, NO_FLAGS, X, changed, written
from .sample_kernels import BARRIER, SIMD_BARRIER


def _synchronisation() -> None:
    sync, P, S = "synchronisation", samples.persistent, samples.row_sums
    for nth, place in enumerate(("after the initial copy", "before h is overwritten", "at the end of a step")):
        changed(f"no barrier {place}", sync, "race", P, BARRIER, "", nth)
        changed(f"mem_none {place}", sync, "race", P, BARRIER, NO_FLAGS, nth)
    changed("mem_device only at the end of a step", sync, "race", P, BARRIER, DEVICE_ONLY, 2)
    changed("no simdgroup barrier after the store", sync, "race", P, SIMD_BARRIER, "", 0)
    changed("no simdgroup barrier before scratch is reused", sync, "race", P, SIMD_BARRIER, "", 1)
    none = "simdgroup_barrier(mem_flags::mem_none);"
    changed("simdgroup barrier with mem_none", sync, "race", P, SIMD_BARRIER, none, 0)
    changed("no barrier between partial sums", sync, "race", S, BARRIER, "")
    changed("simdgroup barrier where a threadgroup one is needed", sync, "race", S, BARRIER, SIMD_BARRIER)
    changed("barrier for half of the threads", sync, "divergence", P, BARRIER, "if (tid < 32) " + BARRIER, 1)
    lanes = f"if (lane < 16) {BARRIER} else\n{BARRIER}"
    changed("lanes at different barriers", sync, "divergence", P, BARRIER, lanes, 1)
    changed("return before a barrier", sync, "divergence", P, BARRIER, "if (tid == 5) return;\n" + BARRIER)
    changed(
        "barrier with a different number of rounds", sync, "divergence", S, BARRIER, f"if (sg < 2) {BARRIER}\n{BARRIER}"
    )
    changed("all lanes write the partial sum", sync, "race", S, "if (lane == 0) partial", "partial")
    device = "o0[i] = a0[i];\n{0}\no1[i] = o0[i ^ 1];"
    two = {"shapes": ((64,), (64,))}
    written("no barrier on device memory", sync, "race", device.format(""), **two)
    written("mem_threadgroup for device memory", sync, "race", device.format(BARRIER), **two)
    cross = f"o0[i] = a0[i];\n{DEVICE_ONLY}\no1[i] = o0[63 - i];"
    written("reads what another threadgroup writes", sync, "race", cross, **two)
    written("two threadgroups write one element", sync, "race", "o0[i % 32] = a0[i];", shapes=((32,),))
    written("sum without atomics", sync, "race", "o0[0] += a0[i];", shapes=((1,),), init_value=0.0)
    atomic = "atomic_fetch_add_explicit(&o0[0], a0[i], memory_order_relaxed);\nif (i == 63) o1[0] = 1;\n"
    plain = atomic.replace("o1[0] = 1", "((device float*)o0)[0] = 1")
    options = {"shapes": ((1,),), "init_value": 0.0, "atomic_outputs": True}
    written("plain write beside atomics", sync, "race", plain, **options)


def _simdgroup() -> None:
    kind = "simdgroup"
    written(
        "simd_sum in a branch",
        kind,
        "divergence",
        "float v = a0[i];\nif (l < 7) v = simd_sum(v);\no0[i] = v;",
        threads=32,
        shapes=((32,),),
    )
    late = "if (l > 20) return;\no0[l] = simd_sum(a0[l]);"
    written("simd_sum after lanes returned", kind, "divergence", late, threads=32, shapes=((21,),))
    written(
        "simd operations at different lines",
        kind,
        "divergence",
        "float v = l < 3 ? simd_sum(a0[i]) :\nsimd_max(a0[i]);\no0[i] = v;",
    )
    written("simd_shuffle from lane 40", kind, "simdgroup", "o0[i] = simd_shuffle(a0[i], ushort(l + 9));")
    written(
        "simd_broadcast from a missing lane",
        kind,
        "simdgroup",
        "o0[i] = simd_broadcast(a0[i], ushort(31));",
        threads=16,
        group=16,
        shapes=((16,),),
    )
    written("quad_broadcast from lane 4", kind, "simdgroup", "o0[i] = quad_broadcast(a0[i], ushort(4));")
    matrix = "simdgroup_float8x8 m;\nsimdgroup_load(m, a0{0}, 8);\nsimdgroup_store(m, o0{1}, 8);"
    written("matrix load at a pointer per lane", kind, "simdgroup", matrix.format(" + l % 2", ""), threads=32)
    written(
        "matrix store at a pointer per lane",
        kind,
        "simdgroup",
        matrix.format("", " + l % 2"),
        threads=32,
        shapes=((65,),),
    )
    written("matrix with 16 threads", kind, "simdgroup", matrix.format("", ""), threads=16, group=16)
    written(
        "matrix load in a branch",
        kind,
        "divergence",
        "simdgroup_float8x8 m(0.0f);\nif (l < 8) simdgroup_load(m, a0, 8);\nsimdgroup_store(m, o0, 8);",
        threads=32,
    )


def _bounds() -> None:
    kind, P, S = "bounds", samples.persistent, samples.row_sums
    changed(
        "device read one too far",
        kind,
        "out-of-bounds",
        samples.pointwise_forward,
        "float(z[row * 4 * H + output_gate * H + j])",
        "float(z[row * 4 * H + output_gate * H + j + 1])",
        where="header",
    )
    changed("device write one too far", kind, "out-of-bounds", P, "c_last[row0 * H + k]", "c_last[row0 * H + k + 1]")
    changed("guard <= instead of <", kind, "out-of-bounds", samples.pointwise_forward, "j >= H", "j > H")
    changed(
        "no guard for the last group",
        kind,
        "out-of-bounds",
        samples.elementwise,
        "if (i >= uint(x_shape[0])) return;",
        "",
    )
    changed("threadgroup array one short", kind, "out-of-bounds", P, "scratch[SG * 4 * 64]", "scratch[SG * 4 * 64 - 1]")
    changed("threadgroup array read one too far", kind, "out-of-bounds", S, "s < uint(SG)", "s <= uint(SG)")
    changed(
        "row stride too large",
        kind,
        "out-of-bounds",
        P,
        "simdgroup_load(left, h_tile + k, H)",
        "simdgroup_load(left, h_tile + k + 8, H)",
    )
    changed(
        "matrix tile behind the end", kind, "out-of-bounds", samples.matmul, "A + row * K + k", "A + row * K + k + 8"
    )
    changed("private array index too large", kind, "out-of-bounds", P, "h_new[b][u] = a.o", "h_new[b][u + 1] = a.o")


def _pointers() -> None:
    kind = "bounds"
    changed("one matrix too many", kind, "out-of-bounds", samples.persistent, "q < 4; ++q) acc", "q <= 4; ++q) acc")
    changed(
        "one matrix too many is stored", kind, "out-of-bounds", samples.persistent, "store(acc[q]", "store(acc[q + 1]"
    )
    pointer = "float v[4] = {1, 2, 3, 4};\nthread float* p = v;\no0[i] = p[(i & 7u) + uint(a0[0]) - 1u];"
    written("private array through a pointer", kind, "out-of-bounds", pointer)
    # clang finds these two only if it puts the function into its caller, where it knows the array's length.
    array = "float v[3] = {1, 2, 3};\n"
    pick = "inline float pick(thread const float* v, uint n) { return v[n]; }\n"
    written("private array of the caller", kind, "out-of-bounds", array + "o0[i] = pick(v, l % 4);", header=pick)
    total = "template <int N> float sum(thread const float* v) {\nfloat s = 0;\n"
    total += "for (int n = 0; n <= N; ++n) s += v[n];\nreturn s;\n}\n"
    written(
        "loop over a private array of the caller", kind, "out-of-bounds", array + "o0[i] = sum<3>(v);", header=total
    )
    written(
        "index from the shape of another input",
        kind,
        "out-of-bounds",
        "o0[i] = a0[i + uint(a1_shape[0]) - 32u];",
        arrays=(X, np.zeros(33, np.float32)),
    )
    written("negative index", kind, "out-of-bounds", "o0[i] = a0[int(i) - 1];")
    written("stride of two assumed", kind, "out-of-bounds", "o0[i] = a0[2 * i];")
    written(
        "float4 load over the end",
        kind,
        "out-of-bounds",
        "o0[i] = (*(const device float4*)(a0 + 4 * i + 4)).w;",
        threads=16,
        group=16,
        shapes=((16,),),
    )
    written(
        "constant table read too far",
        kind,
        "out-of-bounds",
        "o0[i] = TABLE[i % 5];",
        header="constant float TABLE[4] = {1, 2, 3, 4};\n",
    )
    written("write to an input", kind, "read-only", "((device float*)a0)[i] = 1;\no0[i] = 2;")
    written(
        "pointer made from a number", kind, "wild-pointer", "o0[i] = *(const device float*)(0x123456780000ul + i * 4);"
    )
    written(
        "null pointer", kind, "wild-pointer", "const device float* p = nullptr;\nif (a0[0] > 5) p = a0;\no0[i] = p[i];"
    )
    written(
        "misaligned float4",
        kind,
        "misaligned",
        "o0[i] = (*(const device float4*)(a0 + 4 * i)).x;",
        threads=16,
        group=16,
        shapes=((16,),),
        skew=1,
    )
    odd = "const float2 v = *(const device float2*)(a0 + i);\no0[i] = v.x * v.y;"
    written("float2 at an odd element", kind, "misaligned", odd, threads=32, shapes=((32,),))


def _initialisation() -> None:
    kind, P = "initialisation", samples.persistent
    changed(
        "h tile not filled completely",
        kind,
        "uninitialised",
        P,
        "k < 8 * H; k += 32 * SG) h_tile",
        "k < 7 * H; k += 32 * SG) h_tile",
    )
    changed(
        "partial sum of one simdgroup missing",
        kind,
        "uninitialised",
        samples.row_sums,
        "if (lane == 0) partial",
        "if (lane == 0 && sg > 0) partial",
    )
    changed("accumulator not initialised", kind, "uninitialised", samples.matmul, "acc(0.0f)", "acc")
    changed("first rows never written", kind, "unwritten", P, "y[(ulong(t)", "if (t > 0) y[(ulong(t)")
    changed(
        "grid covers half of the rows",
        kind,
        "unwritten",
        P,
        "c_last[row0 * H + k] =",
        "if (row0 == 0) c_last[row0 * H + k] =",
    )
    written("output read before written", kind, "uninitialised", "o0[i] += a0[i];")
    written("uninitialised variable", kind, "compile", "float s;\nif (i > 100) s = 1;\no0[i] = s + a0[i];")
    written(
        "private array partly filled",
        kind,
        "uninitialised",
        "float v[4];\nfor (uint k = 0; k < 3; ++k) v[k] = a0[k];\nfloat s = 0.0f;\n"
        "for (uint k = 0; k < 4; ++k) s += v[k];\no0[i] = s;",
    )
    written("one element of the output left out", kind, "unwritten", "if (i != 13) o0[i] = a0[i];")


def _arithmetic() -> None:
    kind = "arithmetic"
    written("integer division by zero", kind, "arithmetic", "o0[i] = float(7 / (int(i) - 3)) + a0[i];")
    written("remainder by zero", kind, "arithmetic", "o0[i] = float(7 % (int(i) - 3)) + a0[i];")
    written(
        "signed overflow of an index", kind, "arithmetic", "const int k = int(i) * 2000000000;\no0[i] = a0[k & 15];"
    )
    written("signed overflow of a sum", kind, "arithmetic", "const int k = 2147483640 + int(i);\no0[i] = float(k);")
    written("float too large for an int", kind, "arithmetic", "o0[i] = float(int(a0[i] * 1e9f));")
    written(
        "function without a return",
        kind,
        "compile",
        "o0[i] = f(a0[i]);",
        header="inline float f(float v) { if (v > 1) return v; }\n",
    )
    written("constant shift by the width", kind, None, "o0[i] = float(1 << 32);")
    written("shift by more than the width", kind, None, "o0[i] = float(1 << (int(i) + 31));")


def _limits() -> None:
    kind = "limits"
    changed(
        "more than 32 KB of threadgroup memory",
        kind,
        "threadgroup-memory",
        samples.persistent,
        "scratch[SG * 4 * 64]",
        "scratch[SG * 4 * 64 + 8192]",
    )
    written("1056 threads per threadgroup", kind, "thread-limit", "o0[i % 64] = 1;", threads=1056, group=1056)
    limited = "#define kernel kernel,max_total_threads_per_threadgroup(32)\n"
    body = "o0[i] = a0[i];\n#undef kernel"
    written("more threads than the kernel is built for", kind, "thread-limit", body, group=64, header=limited)
    written(
        "private array of 512 KB",
        kind,
        "compile",
        "float v[131072];\nfor (uint k = 0; k < 131072; ++k) v[k] = a0[k % 64] * float(i + k);\n"
        "float s = 0.0f;\nfor (uint k = 0; k < 131072; ++k) s += v[(k * 7) % 131072];\no0[i] = s;",
    )


def add_bugs() -> None:
    """Add kernels with bugs that show when they run (e.g. races, indices out of bounds) to the table of planted
    bugs."""
    for add in (_synchronisation, _simdgroup, _bounds, _pointers, _initialisation, _arithmetic, _limits):
        add()
