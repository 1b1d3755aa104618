"""Tests of the launches of the Metal engines: thread counts, numbers of launches, kernel source, bytes moved, and
what a call leaves in memory."""

import gc
import re
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import mlx.core as mx
import numpy as np
import pytest
from cases import METAL, draw, draw_cotangents, run, to_mlx
from kernel_calls import usual_call
from kernel_texts import name_of, noted
from metal_emulator.lowering import blank_comments, matching, split_top_level
from metal_emulator.source_lines import map_lines
from on_metal import ENGINES, WEIGHTS, matrices_from, on_metal
from pointwise_cases import Form

import mlx_lstm
from mlx_lstm import lstm
from mlx_lstm.engines import FUSED_LIMIT, autodiff, choice
from mlx_lstm.engines.cells import GRUCell, LSTMCell, PointwiseCell, RNNCell
from mlx_lstm.engines.choice import FUSED_NUMBERS, STEPWISE_GATES
from mlx_lstm.engines.metal import fused as kernels_fused
from mlx_lstm.engines.metal import kernel as kernels
from mlx_lstm.engines.metal import stepwise as kernels_stepwise
from mlx_lstm.engines.metal.rows import JOINED, LEFT, joined_beside, joins
from mlx_lstm.engines.problem import LIMITS, Problem, limited
from mlx_lstm.ground.machine import shader_folder
from mlx_lstm.oracle import forward
from mlx_lstm.recurrence import unguarded

# --- Thread counts and kernel names ----------------------------------------------------------------------------------


# (engine, row of ROWS, batch size, other options). Together they have products in lanes and in tiles, and every number
# of sequences per threadgroup.
LAYERS = [
    ("fused", "lstm, bare", 3, {"bidirectional": True}),
    ("fused", "gru", 18, {}),
    ("fused", "gru_before", 40, {}),
    ("stepwise", "lstm", 18, {}),
    ("stepwise", "gru", 3, {"bidirectional": True}),
]


@pytest.mark.parametrize("engine, row, B, options", LAYERS)
def test_the_order_of_threads_does_not_change_a_bit(engine, row, B, options):
    case, cotangents = usual_call(engine, row, (3, B, 2, 12, 13), dtype=np.float32, **options)
    seen = []
    for order in ("forward", "reverse", "random", "random"):
        with on_metal(order=order, seed=len(seen)):
            seen.append(run(case, engine, np.float32, cotangents))
    for outputs, gradients in seen[1:]:
        for name, value in (outputs | gradients).items():
            np.testing.assert_array_equal(value, (seen[0][0] | seen[0][1])[name], err_msg=name)


def users_cell(gates):
    """Return a recurrent cell of the user with one state and this number of gates."""
    return PointwiseCell(Form(lambda a, state: (sum(a[1:], a[0]) + state[0],), gates).graph(2, 7))


EVERY_CELL = [LSTMCell(), GRUCell(), GRUCell(reset="before"), RNNCell()]
EVERY_CELL += map(users_cell, (1, 4, 5, 6, FUSED_NUMBERS - 1))


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("cell", EVERY_CELL, ids=lambda cell: cell.op)
def test_fused_stays_within_the_limits_of_metal(cell, itemsize):
    """`fused` needs at most 1024 threads and 32 KB of threadgroup memory at every size for which the library may
    choose this engine by itself."""
    for H in range(1, FUSED_LIMIT.get(cell.op, 256) + 1):
        for B, D in ((1, 1), (17, 1), (1000, 1), (33, 2)):
            for sweep in (False, True):
                tiling = kernels_fused.fused_tiling(kernels_fused.LayerSize(cell, B, H, itemsize, D), backward=sweep)
                assert tiling.threads <= 1024 and tiling.bytes <= 32768
                assert tiling.threads >= (4 if tiling.matrices else kernels_fused.lanes_of(cell)) * H


def test_a_kernel_is_compiled_for_its_threads():
    """The source of a kernel with many threads declares the thread count. Otherwise the compiler could use too many
    registers per thread, and MLX would refuse the launch."""
    for H, op, threads in ((20, "lstm", 0), (100, "lstm", 416), (100, "gru", 416), (400, "rnn", 416)):
        for text in texts_of((1, 1, 2, H, 2), "fused", op=op):
            found = re.findall(r"#define kernel kernel,max_total_threads_per_threadgroup\((\d+)\)", text)
            assert found == ([str(threads)] if threads and "fused" in name_of(text) else [])


VARIANTS = (
    *({}, {"mask": (2, 4, "P")}, {"keep": True}, {"lengths": [2, 1, 0, 2]}, {"h0": None}, {"b": None}),
    *({"bidirectional": True}, {"peephole": True}, {"c0": None}, {"bhn": None}, {"projected_x": True}),
    {"mask": (2, 4, "P"), "lengths": [2, 1, 0, 2], "h0": None, "reverse": True},
)
"""Options of calls that differ in which arrays they have."""


@pytest.mark.parametrize("engine", ["fused", "stepwise"])
@pytest.mark.parametrize("op", ["lstm", "gru", "rnn"])
def test_a_name_has_one_text(engine, op):
    """Two kernels with the same name always have the same source, also if the calls differ only in which arrays they
    have, or in the width of indices. Otherwise MLX, which caches compiled kernels by name, would compile a kernel again
    whenever the source for its name changes."""
    texts = {}
    only = {"peephole": "lstm", "c0": "lstm", "bhn": "gru"}
    own = {"lstm": [{"projection": True}] * (engine == "stepwise"), "gru": [{"reset": "before"}], "rnn": []}[op]
    for limits, options in [({}, options) for options in (*VARIANTS, *own)] + [({"index": 0}, {})]:
        if all(only.get(name, op) == op for name in options):
            with limited(**limits):
                found = texts_of((2, 4, 2, 5, 3), engine, op=op, **options)
            for text in found:
                assert texts.setdefault(name_of(text), text) == text, (options, limits)
    assert len(texts) > 5


# --- Numbers of launches and bytes -----------------------------------------------------------------------------------


def run_drawn(sizes, engine, options):
    """Run a random call and its gradient."""
    rng = np.random.default_rng(0)
    case = draw(rng, sizes=sizes, dtype=np.float32, **options)
    cotangents = draw_cotangents(rng, forward(**case), np.float32)
    run(case, engine, np.float32, {name: cotangents[name] for name in ("h", "hT", "cT") if name in cotangents})


def launches_of(sizes, engine, **options):
    """Return the log of all launches of a random call and its gradient."""
    with on_metal() as log:
        run_drawn(sizes, engine, options)
    return log


def texts_of(sizes, engine, **options):
    """Return a Counter {source of a kernel: number of its launches} for a call and its gradient. No kernel is compiled,
    because that takes most of the time of `launches_of`."""
    with noted() as texts:
        run_drawn(sizes, engine, options)
    return texts


CELLS = {cell.op: cell for cell in (LSTMCell(), GRUCell(), RNNCell())}


def graph_of(engine, T, projection=False, dtype=mx.float32, op="lstm", D=1):
    """Return {MLX primitive: number of its launches} for the forward and the backward pass together. Copies of arrays
    are launches, too. A concatenation has one launch per input, because MLX copies the inputs one by one."""
    B, I, H, P, cell, own = 2, 3, 8, 4, CELLS[op], (2,) if D == 2 else ()
    width, rows = P if projection else H, D * cell.gates * H
    shapes = {"x": (T, B, I), "Wx": (rows, I), "Wh": (*own, rows // D, width), "b": (rows,), "h0": (B, D * width)}
    shapes |= {"c0": (B, D * H)} if op == "lstm" else {"bhn": (D * H,)} if op == "gru" else {}
    shapes |= {"Wp": (*own, P, H)} if projection else {}
    arrays = {name: mx.zeros(shape, dtype) for name, shape in shapes.items()}
    problem = Problem(T, B, H, width, cell, dtype, bidirectional=D == 2)
    module = autodiff.ENGINE_MODULES[engine]

    def sweeps(*values):
        given = dict(zip(arrays, values, strict=True))
        saved = module.forward(problem, given)
        gradients = module.backward(problem, given, saved, {"h": saved["h"]})
        saved.pop(kernels_stepwise.ROWS, None)
        return [*saved.values(), *gradients.values()]

    nodes, count, memory = [], Counter(), {}
    kernels.forget()
    with mx.stream(METAL):
        mx.export_function(nodes.append, sweeps, *arrays.values())
    for node in nodes:
        if node.get("type") == "primitive":
            count += launches_of_node(node, memory)
        elif node.get("type") == "inputs":
            memory |= {name: np.empty(shape) for name, shape, _ in node["inputs"]}
        elif node.get("type") == "constants":
            memory |= {name: np.empty(array.shape) for name, array in node["constants"]}
    return count


def launches_of_node(node, memory):
    """Return {kind of launch: number} for one MLX primitive. Copies of arrays that are not contiguous are launches,
    too. `memory` maps the name of each array of the graph to a NumPy array with the same shape and strides."""
    name, arguments = node["name"], node["arguments"]
    given = [memory[word] for word, *_ in node["inputs"]]
    views = {
        "Transpose": lambda: given[0].transpose(arguments[0]),
        "Reshape": lambda: given[0].reshape(arguments[0], copy=False),
        "Slice": lambda: given[0][tuple(slice(*ends) for ends in zip(*arguments, strict=True))],
        "ExpandDims": lambda: np.expand_dims(given[0], tuple(arguments[0])),
        "Squeeze": lambda: np.squeeze(given[0], tuple(arguments[0])),
        "Broadcast": lambda: np.broadcast_to(given[0], arguments[0]),
    }
    for word, shape, _ in node["outputs"]:
        memory[word] = np.empty(shape)
    if name in views:
        try:
            memory[node["outputs"][0][0]] = views[name]()
        except ValueError:  # NumPy cannot return a view; MLX copies the array in the same cases
            return Counter({f"{name} that copies": 1})
        return Counter()
    if name == "CustomKernel":
        return Counter({name: 1, "copy for a kernel": sum(not array.flags.c_contiguous for array in given)})
    return Counter({name: len(given) if name == "Concatenate" else 1})


@pytest.mark.parametrize("op", CELLS)
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16], ids=str)
def test_launches_of_fused_with_those_of_mlx(op, dtype):
    """A call of `fused` with its gradient needs at most 12 kernel launches (a GRU 14), MLX's copies included. This
    holds for any number of steps T and for one or two directions."""
    count = graph_of("fused", 9, dtype=dtype, op=op)
    assert count.total() <= (14 if op == "gru" else 12), count
    assert graph_of("fused", 3, dtype=dtype, op=op) == count
    both = graph_of("fused", 9, dtype=dtype, op=op, D=2)
    assert both.total() <= (14 if op == "gru" else 12) and both["CustomKernel"] == count["CustomKernel"], both


@pytest.mark.parametrize("op", CELLS)
@pytest.mark.parametrize("T", [1, 3, 9, 30, 200])
def test_launches_of_stepwise_with_those_of_mlx(op, T):
    """A call of `stepwise` with its gradient needs at most 2T + 10 kernel launches for T steps (a GRU 2T + 15),
    MLX's copies included. This holds for one or two directions."""
    if op != "lstm" and T > 30:
        return
    for dtype in (mx.float32, mx.float16):
        count = graph_of("stepwise", T, dtype=dtype, op=op)
        for of in (count, graph_of("stepwise", T, dtype=dtype, op=op, D=2)):
            assert of["CustomKernel"] == 2 * T + 4
            assert of.total() <= 2 * T + (15 if op == "gru" else 10), of


@pytest.mark.parametrize("T", [1, 3, 9, 30, 200])
def test_launches_of_stepwise_with_a_projection(T):
    """With a projection, `stepwise` has two launches per step in the forward pass and two in the backward pass. All
    launches of a call with its gradient are at most 4T + 12 for T steps."""
    for dtype in (mx.float32, mx.float16):
        for D in (1, 2):
            count = graph_of("stepwise", T, True, dtype, D=D)
            assert count["CustomKernel"] == 4 * T + 4 and count.total() <= 4 * T + 12, count


@pytest.mark.parametrize("most", JOINED)
@pytest.mark.parametrize(("left", "again"), [(LEFT, 0.6), (LEFT // 2, 1.1)])
def test_rows_are_few_at_the_end_of_a_sweep(left, again, most):
    """Each time step of `stepwise` writes an array, and later launches concatenate neighbouring arrays. For any number
    of steps T, the number of arrays that remain at the end is at most `left`. Concatenated arrays may be concatenated
    again; each step's numbers are copied about once for each such round."""
    for T in (*range(1, 90), *range(150, 170), *range(310, 330), 639, 699, 1280, 1281, 5000, 5121, 10241):
        found, rows = joins(T, left, most)
        copied = [sum(join.steps) for join in found if join]
        assert len(found) == T and all(len(join.steps) <= most for join in found if join)
        assert len(rows) <= left and sum(rows) == T
        levels = next(level for level in range(T) if left * most**level >= T)
        assert sum(copied) <= (levels + again) * T


def test_a_launch_binds_at_most_31_arrays():
    """No launch binds more than 31 arrays, which is Metal's limit. So a launch concatenates at most 16 arrays, or at
    most 8 if its other arguments leave no room for 16."""
    assert [joined_beside(others) for others in (11, 15, 16, 23)] == [16, 16, 8, 8]
    options = {"peephole": True, "mask": (30, 2, "P"), "keep": True, "lengths": np.array([30, 3])}
    for case in (options, {**options, "projection": True}, {**options, "op": "gru", "peephole": False}, {}):
        for text in texts_of((30, 2, 2, 5, 5), "stepwise", **case):
            assert text.count("[[buffer(") <= 31


def test_launches():
    """A call with its gradient has exactly the documented number of launches of our kernels.

    `fused` has two launches per pass: one copies the weights into the kernel's order, one computes all steps. Between
    the passes one more launch, `recurrent_input`, prepares the gradient of Wh.

    `stepwise` has one launch per step and pass (two with a projection), and one at the end of each pass. Two more
    launches prepare the gradient of Wh and compute dh0.
    """
    assert [texts_of((T, 2, 3, 4, 2), "fused").total() for T in (1, 9)] == [5, 5]
    assert [texts_of((T, 2, 3, 4, 2), "stepwise").total() for T in (1, 9)] == [6, 22]
    assert texts_of((9, 2, 3, 4, 2), "stepwise", projection=True).total() == 4 * 9 + 4


LIMITED = {
    "lstm": {"peephole": True},
    "projection": {"peephole": True, "projection": True},
    "gru": {"op": "gru"},
    "gru_before": {"op": "gru", "reset": "before"},
    "rnn": {"op": "rnn"},
}


@pytest.mark.parametrize("engine", ENGINES)
def test_a_line_of_a_kernel_is_that_of_its_file(engine):
    """`#line` directives map each line of a kernel's source to a line of a shader file. Both lines have the same
    code, without comments. If the kernel does not need this code, its line is empty."""
    files = {path.name: path.read_text() for path in shader_folder().glob("*.metal")}
    for source in texts_of((2, 2, 3, 4, 2), engine):
        text = source.split("\n")
        places = map_lines(source, files)
        assert len({file for file, _ in places.values()}) > 1
        for number, (file, line) in places.items():
            code = files[file].split("\n")[line - 1].partition("//")[0].strip()
            assert text[number - 1] in (code, "")
        assert any(line.startswith('#line 1 "') and name_of(source).startswith(line[9:-1]) for line in text)


def test_shaders_have_few_parameters_and_short_functions():
    """Each function in metal/ has at most 12 template parameters, 10 function parameters and 80 lines."""
    seen = 0
    for path in shader_folder().glob("*.metal"):
        code = blank_comments(path.read_text())
        for found in re.finditer(
            r"(?:template <([^{};]*?)>\s*)?(?:inline |static |constexpr )*[\w:<>*& ]+?(\w+)\(", code
        ):
            end = matching(code, found.end(), "(", ")")
            body = re.compile(r"\s*\{").match(code, end)
            if not body or found[2] in ("for", "if", "while", "switch"):
                continue
            seen += 1
            parameters = split_top_level(code[found.end() : end - 1])
            lines = code.count("\n", end, matching(code, body.end(), "{", "}")) + 1
            assert len(split_top_level(found[1] or "")) <= 12, (path.name, found[2])
            assert len(parameters) <= 10 and lines <= 80, (path.name, found[2], len(parameters), lines)
    assert seen > 100


@pytest.mark.parametrize("op", CELLS)
def test_stepwise_stays_within_the_limits_of_metal(op):
    """Every variant of the `stepwise` kernels needs at most 1024 threads and 32 KB of threadgroup memory. Both
    numbers depend only on the batch size and the cell."""
    seen = set()

    def prepare(source, template, inputs, outputs, groups, threads):
        (vectors,) = re.findall(r"^threadgroup vec<float, 4> \w+\[(\d+)\];$", source.body, re.M)
        seen.add((threads, 16 * int(vectors)))

    with patch.object(kernels_stepwise, "prepare", prepare):
        for B in (*range(1, 70), 1000):
            problem = Problem(1, B, 7, 7, CELLS[op])
            rows = kernels_stepwise.stepwise_rows(B)
            forward = kernels_stepwise.forward_tile(problem)[:2]
            for high, columns in (forward, *kernels_stepwise.TILES.get(rows, [(rows, 8)])):
                shape = {"tile": (high, columns), "units": (7, 7), "length": 8}
                kernels_stepwise.StepKernel(problem, (), kernels_stepwise.StepShader("stepwise_dh", "", {}), **shape)
    assert all(threads <= 1024 and size <= 32768 for threads, size in seen), seen
    assert len(seen) > 3


@pytest.mark.parametrize("gates", [1, 2, 3, 8, 9, 15, 16, STEPWISE_GATES])
def test_stepwise_stays_within_the_limits_of_metal_with_a_users_cell(gates):
    """With a user's cell of any number of gates that `stepwise` accepts, a threadgroup of its forward step needs at
    most 1024 threads and 32 KB of threadgroup memory."""
    seen = set()

    def prepare(source, template, inputs, outputs, groups, threads):
        (vectors,) = re.findall(r"^threadgroup vec<float, 4> \w+\[(\d+)\];$", source.body, re.M)
        seen.add((threads, 16 * int(vectors)))

    cell = users_cell(gates)
    with patch.object(kernels_stepwise, "prepare", prepare):
        for B in (1, 3, 9, 33):
            kernels_stepwise.forward_kernel(Problem(1, B, 7, 7, cell), ())
    kernels.forget()
    assert len(seen) > 2
    assert all(threads <= 1024 and size <= 32768 for threads, size in seen), seen


@pytest.mark.parametrize("D", [1, 2])
def test_a_step_back_has_threadgroups_for_many_cores(D):
    """The tiles of a backward step are small enough to keep 32 GPU cores busy: at B = 32 and H = 256 there are at
    least 32 threadgroups. Larger problems use larger tiles, which read less memory."""
    for B, H, groups, tile in ((32, 256, 32, (16, 16)), (8, 256, 32, (8, 8)), (128, 1024, 128, (32, 32))):
        limits = LIMITS._replace(cores=32)
        problem = Problem(1, B, H, H, LSTMCell(), bidirectional=D == 2, limits=limits)
        rows, columns = kernels_stepwise.tile_of(problem, H)
        assert (rows, columns) == tile or D == 2
        assert D * -(-B // rows) * -(-H // columns) >= groups


COUNTED = {
    "mask and peephole": {"mask": (64, 2, "P"), "peephole": True, "bidirectional": True},
    "gru": {"op": "gru"},
    "gru_before_both": {"op": "gru", "reset": "before", "bidirectional": True, "mask": (64, 2, "P")},
    "rnn": {"op": "rnn"},
    "wide": {"wide": True},
    "wide_gru_both": {"wide": True, "op": "gru", "bidirectional": True},
}


@pytest.mark.not_on_a_mac("bytes: the emulator counts them")
@pytest.mark.parametrize("options", COUNTED.values(), ids=COUNTED)
def test_fused_moves_hardly_more_than_every_array_once(options):
    """Each launch of `fused` reads and writes at most 1.15 times as many bytes as its arrays have. Weights and the
    sizes in constant memory are not counted. If several lanes load the same number at the same time, this load counts
    once. There are three such cases: the four lanes of a unit all load its state; the fourth lane of a GRU's unit loads
    a gate of another lane; and the 8 x 8 matrices have room for eight sequences, so with a batch of 2 the lanes of six
    missing sequences load the numbers of the last sequence."""
    left_out, op = (*WEIGHTS, "sizes"), options.get("op")
    shared, gates = ("h", "c", "dh", "dc", "q", "mask"), ("z", "gates", "dgates")
    by_all_lanes = dict.fromkeys(shared, 1 if op == "rnn" else 4) | dict.fromkeys(gates, 4 / 3 if op == "gru" else 1)
    if options.get("wide"):
        by_all_lanes = dict.fromkeys((*shared, *gates), 4)
    options = dict(options)
    with matrices_from(1 if options.pop("wide", False) else 100):
        log = launches_of((64, 2, 3, 32, 3), "fused", **options)
    for launch in log:
        buffers = {name: buffer for name, buffer in launch.traffic.items() if name not in left_out}
        moved = sum(
            buffer.bytes_read / by_all_lanes.get(name, 1) + buffer.bytes_written for name, buffer in buffers.items()
        )
        floor = sum(buffer.size for buffer in buffers.values())
        assert moved <= 1.15 * floor, (launch.name, moved, floor)


# --- Exported functions, inference and garbage -----------------------------------------------------------------------


def test_kernels_are_in_an_exported_function(tmp_path):
    arrays = [mx.zeros(shape) for shape in ((3, 2, 4), (16, 4), (16, 4), (16,))]
    for engine in ENGINES:
        path = tmp_path / f"{engine}.mlxfn"
        names = exported_kernels(engine, arrays, path)
        assert names and all(name.startswith(f"custom_kernel_lstm_{engine}_") for name in names)
        assert f"lstm_{engine}_forward".encode() in path.read_bytes()


def exported_kernels(engine, arrays, path):
    """Export a call of `lstm` to the file `path`. Return the names of the kernels in the exported graph."""

    def op(*arrays):
        return lstm(*arrays, engine=engine, training=False).h

    nodes = []
    with (
        mx.stream(METAL),
        patch.object(choice, "current_device", lambda: "gpu"),
        patch.object(choice, "has_metal", lambda: True),
    ):
        kernels.forget()
        mx.export_function(str(path), op, *arrays)
        mx.export_function(nodes.append, op, *arrays)
    return [node["arguments"][0] for node in nodes if node.get("name") == "CustomKernel"]


@pytest.mark.parametrize("engine", ENGINES)
def test_second_and_forward_mode_derivatives_are_refused(engine):
    case = draw(np.random.default_rng(0), sizes=(4, 2, 3, 9, 9), dtype=np.float32)
    x, Wx, Wh = (to_mlx(case[name], np.float32) for name in ("x", "Wx", "Wh"))

    def of_Wh(Wh):
        return lstm(x, Wx, Wh, engine=engine).h.sum()

    with on_metal():
        with pytest.raises(RuntimeError, match=f"engine='{engine}' has no second derivative"):
            mx.eval(mx.grad(lambda Wh: (mx.grad(of_Wh)(Wh) ** 2).sum())(Wh))
        with pytest.raises(RuntimeError, match=f"engine='{engine}' has no forward-mode derivative"):
            mx.eval(mx.jvp(of_Wh, [Wh], [Wh]))


def test_metal_kernel_is_called_in_one_place():
    package = Path(mlx_lstm.__file__).parent
    calls = [path.name for path in package.rglob("*.py") if re.search(r"metal_kernel\(", path.read_text())]
    assert calls == ["kernel.py"]


def test_fused_writes_no_gates_in_inference():
    """With training=False, the forward pass of `fused` does not write the gates. If a gradient is requested
    nevertheless, a second forward pass computes them."""
    case = draw(np.random.default_rng(0), sizes=(4, 2, 3, 9, 9), dtype=np.float32, h0=None, c0=None)
    cotangents = {"h": np.ones((4, 2, 9), np.float32)}
    with on_metal() as log:
        _, inference = run(case | {"training": False}, "fused", np.float32, cotangents)
        sweeps = [launch.source for launch in log if re.search("fused_(for|back)ward", launch.name)]
        assert [" gates [[buffer" in source for source in sweeps] == [False, True, True]
        _, training = run(case, "fused", np.float32, cotangents)
    for name, gradient in training.items():
        np.testing.assert_array_equal(inference[name], gradient, err_msg=name)


class MeanKernel:
    """Stand-in for a kernel, made of MLX's operations: it fills its n-th output with n / 9 of the sum of its inputs'
    means. Unlike the emulator it computes nothing before MLX evaluates the graph. So it also works inside mx.compile.
    """

    def __init__(self, **description):
        self.count = len(description["input_names"])

    def __call__(self, inputs, output_shapes, output_dtypes, **sizes):
        assert len(inputs) == self.count
        value = sum(array.astype(mx.float32).mean() for array in inputs) / 9
        pairs = enumerate(zip(output_shapes, output_dtypes, strict=True), 1)
        return [mx.broadcast_to(value * n, shape).astype(dtype) for n, (shape, dtype) in pairs]


class ZeroKernel:
    """Stand-in for a kernel that runs when it is called, as in the emulator: its outputs are zeros in memory."""

    def __init__(self, **description):
        pass

    def __call__(self, inputs, output_shapes, output_dtypes, **sizes):
        outputs = [mx.zeros(*output) for output in zip(output_shapes, output_dtypes, strict=True)]
        mx.eval(inputs, outputs)
        return outputs


@contextmanager
def replaced_kernels(stand_in):
    """Return a context in which the Metal engines can be used, with a stand-in for each of their kernels."""
    kernels.forget()
    try:
        with (
            patch.object(choice, "current_device", lambda: "gpu"),
            patch.object(choice, "has_metal", lambda: True),
            patch.object(mx.fast, "metal_kernel", stand_in),
            unguarded(),
        ):
            yield
    finally:
        kernels.forget()


@pytest.mark.parametrize("engine", ENGINES)
def test_the_backward_pass_reads_the_forward_pass_of_its_own_graph(engine):
    """MLX does not see some arrays that the backward pass of a Metal engine reads. The gradients are nevertheless
    right in four cases: a compiled gradient, the gradient of a compiled function, mx.checkpoint, and a compiled graph
    that runs again."""
    rng, shapes = np.random.default_rng(0), ((40, 3, 4), (20, 4), (20, 5), (20,))
    arrays = [mx.array(rng.normal(size=shape), mx.float32) for shape in shapes]

    def loss(*arrays):
        outputs = lstm(*arrays, engine=engine)
        return (outputs.h**2).sum() + outputs.cT.sum()

    def gradients(function):
        return mx.grad(function, argnums=(0, 1, 2, 3))

    with replaced_kernels(MeanKernel):
        expected = gradients(loss)(*arrays)
        compiled = mx.compile(gradients(mx.checkpoint(loss)))
        functions = [mx.compile(gradients(loss)), gradients(mx.compile(loss)), gradients(mx.checkpoint(loss))]
        for function in (*functions, compiled, compiled):
            for found, array in zip(function(*arrays), expected, strict=True):
                np.testing.assert_array_equal(found, array)
    assert all(array.any() for array in expected)


def test_rows_of_the_forward_pass_are_freed_while_the_backward_pass_reads_them():
    """If each launch runs when it is called, a training step of an LSTM on `stepwise` needs the most memory at its last
    launch. Its arrays then have the size of 12 arrays [T, B, H]: h, c, h before each step, 5 in the rows that the
    backward steps wrote, and 4 in dz. The rows of the forward pass, of the size of 6 such arrays, are freed before."""
    T, B, H = 256, 8, 16
    x, dh, *weights = (mx.ones(shape) for shape in ((T, B, H), (T, B, H), (4 * H, H), (4 * H, H), (4 * H,)))

    def step(T):
        mx.eval(mx.vjp(lambda *arrays: [lstm(*arrays, engine="stepwise").h], [x[:T], *weights], [dh[:T]]))

    with replaced_kernels(ZeroKernel), mx.stream(mx.cpu):
        step(2)  # the constants that the launches of all sizes share stay in memory
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        step(T)
        held = (mx.get_peak_memory() - before) / x.nbytes
    assert held == pytest.approx(12, rel=0.03)


def test_a_second_backward_pass_gives_the_same_gradients():
    """A second backward pass of `stepwise` after the same forward pass gives the same gradients, although the first
    one freed the rows that contain the gates."""
    rng, shapes = np.random.default_rng(0), {"x": (3, 2, 4), "Wx": (20, 4), "Wh": (20, 5)}
    arrays = {name: mx.array(rng.normal(size=shape), mx.float32) for name, shape in shapes.items()}
    problem = Problem(3, 2, 5, 5, LSTMCell())
    with replaced_kernels(MeanKernel):
        saved = kernels_stepwise.forward(problem, arrays)
        first, second = (kernels_stepwise.backward(problem, arrays, saved, {"h": saved["h"]}) for _ in range(2))
    for name, gradient in first.items():
        np.testing.assert_array_equal(second[name], gradient, err_msg=name)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_call_leaves_nothing_to_the_garbage_collector(engine):
    """The graph, the gradient and all their arrays are freed when the last reference is deleted, without the garbage
    collector."""
    arrays, found = [mx.ones(shape) for shape in ((3, 2, 4), (16, 4), (16, 4))], []

    def call(*arrays):
        mx.value_and_grad(lambda *arrays: lstm(*arrays, lengths=[3, 1], engine=engine).h.sum())(*arrays)
        found.append(gc.collect())
        return arrays[0]

    kernels.forget()
    gc.collect()
    gc.freeze()  # objects of other tests, which the collector then leaves alone
    gc.disable()
    try:
        with (
            patch.object(choice, "current_device", lambda: "gpu"),
            patch.object(choice, "has_metal", lambda: True),
            mx.stream(METAL),
        ):
            mx.export_function(lambda node: None, lambda *arrays: [call(*arrays) for _ in range(2)], *arrays)
    finally:
        gc.enable()
        gc.unfreeze()
        kernels.forget()
    assert found[1] == 0
