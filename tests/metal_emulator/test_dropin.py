"""Test the replacement for `mx.fast.metal_kernel`: its log, counters and findings, gradients, strided inputs, and
cached kernels."""

import threading
from functools import cache

import mlx.core as mx
import numpy as np
import pytest

import metal_emulator
from metal_emulator import KernelError, emulated_metal
from metal_emulator import sample_kernels as samples
from metal_emulator.sample_kernels import Sample

SQUARE = "const uint i = thread_position_in_grid.x;\nout[i] = x[i] * x[i];"


def square(x: mx.array) -> mx.array:
    kernel = mx.fast.metal_kernel(name="square", input_names=["x"], output_names=["out"], source=SQUARE)
    size = x.size
    return kernel(
        inputs=[x],
        grid=(size, 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[x.shape],
        output_dtypes=[x.dtype],
        stream=mx.gpu,
    )[0]


def test_log_and_counters():
    with emulated_metal() as log:
        samples.persistent(T=2, N=8, H=16, SG=2).run()
    d = log[0]
    assert (d.name, d.grid, d.threadgroup) == ("sample", (64, 1, 1), (64, 1, 1))
    assert d.counters["threadgroups"] == 1 and d.counters["threads"] == 64
    assert d.counters["threadgroup_barriers"] == 1 + 2 * 2
    assert d.counters["simdgroup_barriers"] == 2 * 2 * 2
    assert d.counters["matrix_operations"] == 2 * 2 * (2 * (1 + 2 * 4) + 4)
    assert d.counters["threadgroup_bytes"] == 8 * 16 * 4 * 2 + 2 * 4 * 64 * 4
    weights = d.traffic["R"]
    assert weights.distinct_read == weights.size == 4 * 16 * 16 * 4
    assert weights.bytes_read == 2 * weights.size
    assert d.traffic["y"].bytes_written == d.traffic["y"].distinct_written == 2 * 8 * 16 * 4
    floor = d.device_bytes(leave_out=["R", "z_shape"])
    assert floor["distinct_read"] == floor["bytes_read"] == (2 * 8 * 64 + 2 * 8 * 16) * 4
    sample = samples.persistent()
    assert d.text_bytes == len(sample.header + sample.source) < d.source_bytes == len(d.source)


def test_simd_operations_count_per_simdgroup():
    with emulated_metal() as log:
        samples.row_sums(rows=3, SG=4).run()
    assert log[0].counters["simd_operations"] == 3 * 4


def test_threads_launch_at_the_same_time():
    """Three threads launch kernels of different sizes at the same time, each for the first time. The runtime has the
    state of one launch only, so the launches wait for one another."""
    barrier, squares, errors = threading.Barrier(3), {}, []

    def work(number):
        x = mx.arange(1000.0 * (number + 1))
        barrier.wait()
        try:
            squares[number] = [np.array(square(x)) for _ in range(20)]
        except Exception as error:
            errors.append(error)

    with emulated_metal():
        threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors
    for number, found in squares.items():
        assert len(found) == 20 and all((one == np.arange(1000.0 * (number + 1)) ** 2).all() for one in found)


def test_findings_are_raised_or_logged():
    bad = Sample("o0[thread_position_in_grid.x + 1] = a0[0];", [np.zeros(8, np.float32)], [(8,)], (8, 1, 1), (8, 1, 1))
    with emulated_metal() as log, pytest.raises(KernelError, match=r"out-of-bounds.*o0 at byte 32.*thread 7"):
        bad.run()
    with emulated_metal(raise_on_findings=False) as log:
        bad.run()
    assert [f.kind for f in log[0].findings] == ["out-of-bounds"]
    assert "o0[thread_position_in_grid.x + 1]" in log[0].source.split("\n")[log[0].findings[0].line - 1]


def test_a_finding_names_file_and_line_of_the_shader():
    header = '#line 7 "reader.metal"\nfloat after(const device float* x, uint i) {\nreturn x[i + 1];\n}\n'
    body = '#line 1 "kernel of a test"\no0[thread_position_in_grid.x] = after(a0, thread_position_in_grid.x);'
    shapes, threads = [(8,)], (8, 1, 1)
    reader = Sample(body, [np.zeros(8, np.float32)], shapes, threads, threads, header=header)
    with emulated_metal(), pytest.raises(KernelError, match=r"out-of-bounds.*reader\.metal:8, thread 7"):
        reader.run()
    wrong = Sample(body, reader.arrays, shapes, threads, threads, header=header.replace("x[i + 1]", "y[i]"))
    with emulated_metal(), pytest.raises(KernelError, match=r"undeclared identifier 'y'.*reader\.metal:8"):
        wrong.run()
    barrier = "simdgroup_barrier(mem_flags::mem_none);"
    branches = f"if (thread_position_in_grid.x < 3) {{\n{barrier}\n}} else {{\n{barrier}\n}}"
    body = f'#line 40 "apart.metal"\n{branches}\no0[thread_position_in_grid.x] = 0;'
    with emulated_metal(), pytest.raises(KernelError, match=r"\(apart.metal:41\).*\(apart.metal:43\), apart.metal:41"):
        Sample(body, [], shapes, threads, threads).run()


def test_gradients_through_custom_function():
    @mx.custom_function
    def function(x):
        return square(x)

    @function.vjp
    def backward(primals, cotangents, outputs):
        return 2 * primals * cotangents

    x = mx.arange(8, dtype=mx.float32)
    with emulated_metal() as log:
        value, gradient = mx.value_and_grad(lambda a: function(a).sum())(x)
    assert len(log) == 1
    assert value.item() == 140 and gradient.tolist() == [2.0 * k for k in range(8)]


def test_strided_inputs():
    source = "const uint i = thread_position_in_grid.x;\nout[i] = x[(i / 3) * x_strides[0] + (i % 3) * x_strides[1]];"
    x = mx.arange(12, dtype=mx.float32).reshape(3, 4).T
    for contiguous in (True, False):
        with emulated_metal():
            kernel = mx.fast.metal_kernel(
                name="copy", input_names=["x"], output_names=["out"], source=source, ensure_row_contiguous=contiguous
            )
            shapes = {"output_shapes": [(4, 3)], "output_dtypes": [mx.float32]}
            got = kernel(inputs=[x], grid=(12, 1, 1), threadgroup=(12, 1, 1), **shapes)[0]
        assert np.array_equal(np.array(got), np.array(x))


def test_scalars_and_integer_arrays():
    source = "const uint i = thread_position_in_grid.x;\no0[i] = a0[i] + a1 + a2[1];"
    sample = Sample(
        source,
        [np.arange(8, dtype=np.float32), np.float32(3), np.array([1, 2], np.int32)],
        [(8,)],
        (8, 1, 1),
        (8, 1, 1),
    )
    sample.keep_types = True
    with emulated_metal():
        assert sample.run()[0].tolist() == [k + 5.0 for k in range(8)]


def test_cached_kernels_need_a_hook_or_install():
    @cache
    def build():
        return mx.fast.metal_kernel(name="square", input_names=["x"], output_names=["out"], source=SQUARE)

    x = mx.arange(8, dtype=mx.float32)
    call = {"grid": (8, 1, 1), "threadgroup": (8, 1, 1), "output_shapes": [(8,)], "output_dtypes": [mx.float32]}
    build()  # caches MLX's own kernel, because no emulation is active
    with emulated_metal(on_enter=[build.cache_clear]) as log:
        build()(inputs=[x], **call)
        build()(inputs=[x], **call)
    assert len(log) == 2
    before = mx.fast.metal_kernel
    metal_emulator.install()
    try:
        kernel = build()
    finally:
        mx.fast.metal_kernel = before
    with emulated_metal() as log:
        kernel(inputs=[x], **call)
    assert len(log) == 1
    if not mx.metal.is_available():
        with pytest.raises(RuntimeError, match="Metal"):
            mx.eval(kernel(inputs=[x], **call))


def test_everything_is_restored():
    before, available = mx.fast.metal_kernel, mx.metal.is_available()
    with pytest.raises(ZeroDivisionError), emulated_metal(pretend_available=True):
        assert mx.metal.is_available()
        raise ZeroDivisionError
    assert mx.fast.metal_kernel is before and mx.metal.is_available() == available


def test_unknown_order():
    with pytest.raises(ValueError, match="order must be"), emulated_metal(order="sideways"):
        pass
