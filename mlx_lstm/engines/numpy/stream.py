"""Run a stack of layers on steps that arrive one at a time, on the engine `numpy`. The weights are copied and the
buffers allocated once; a step then runs without allocating memory.

Within a step every array is feature-major, [rows, B]. B: batch items, I: input features, H: hidden units, P: the width
of h, C: states of a cell besides h, U: inputs of each step of a user's cell. v: the arrays of a layer by name.

The class `Step` runs one step; its attribute `products` holds the weights and the buffers of h. If this is a
`JoinedProduct`, one product [Wx b Wh] [x; 1; h] gives the preactivations, so x is written into its operand. Otherwise
this module computes the input's part as a product of its own.
"""

import numpy as np

from ..problem import Problem
from .norms import Normalisation, norm_of_input, of_stream, with_centred_weights
from .products import Array, JoinedProduct, Views, bias_of, in_blocks
from .steps import Step


class StreamedLayer:
    """One layer of a stream, with its state: h [P, B] and c [H, B], for H hidden units, B batch items and h of width
    P.

    There are two buffers for h, and two for c. A step reads the states from buffer k, 0 or 1, and writes the new states
    to the other buffer; the next step swaps them. Before a step the caller writes its input to x_rows[k] [I, B]. c [C
    H, B] has all states besides h; for a cell without such a state it has no rows.
    """

    def __init__(self, problem: Problem, v: Views):
        """Prepare a layer whose states are zero. v: the parameters in float32 or float64. Their memory must not change
        later. problem: the description of a single step."""
        (_, B, H, _), dtype, cell = problem[:4], v["Wx"].dtype, problem.cell
        I = v["Wx"].shape[1]
        v = v | {"x": np.empty((1, B, I), dtype)}  # `Step` reads only its shape and dtype
        # streamed=True: steps arrive one at a time, so the input's product cannot be computed for many steps at once.
        step = Step(problem, v, mask=None, streamed=True)
        self.step, products = step, step.products
        self.h: list[Array] = products.h_buffers
        self.operands: list[Array] = products.operands
        self.c: list[Array] = [np.zeros((cell.carried * H, B), dtype) for _ in range(2)]
        self.inputs: Array | None = None
        self.norm: Normalisation | None = None  # the layer normalisation of the input's product
        if not isinstance(products, JoinedProduct):  # compute x Wx^T here, with the bias as one more column of Wx
            bias = bias_of(problem, v)
            if cell.norm is not None and cell.norm.of == "products":
                v = with_centred_weights(of_stream(problem), v)
                self.norm, bias = norm_of_input(of_stream(problem), v), None  # the norm adds the bias
            Wx = v["Wx"] if bias is None else np.concatenate([v["Wx"], bias[:, None]], axis=1)
            # A large matrix is divided into blocks, each so small that BLAS computes its product in one thread.
            # product: a view of `inputs`, divided like the weights.
            inputs: Array = np.empty((len(Wx), B), dtype)
            self.weights = in_blocks(np.ascontiguousarray(Wx), B, streamed=True)
            self.inputs, self.product = inputs, inputs.reshape(*self.weights.shape[:-1], -1)
            self.column: Array = np.ones((Wx.shape[1], B), dtype)  # [x; 1]
            self.x_rows: list[Array] = 2 * [self.column[:I]]  # the same memory for k = 0 and 1
        else:
            self.x_rows = list(products.x_rows)
        for h in self.h:
            h.fill(0)

    def run(self, k: int) -> Array:
        """Run one step. k: which of the two buffers (0 or 1) holds the h before the step; the step reads its input from
        x_rows[k]. Return the other buffer, which holds the new h [P, B]."""
        if self.inputs is not None:
            np.matmul(self.weights, self.column, out=self.product)
            if self.norm is not None:  # the layer normalisation of the input's product
                self.norm(self.inputs, self.inputs)
        h, new = self.h[k], self.h[1 - k]
        # None: there is no memory for a backward pass.
        self.step.run(self.operands[k], self.inputs, h, self.c[k], None, self.c[1 - k], new)
        return new


class Stream:
    """A stack of layers that runs one step at a time. A user's cell with inputs of its own is in a stack of one layer.

    batch: the sizes of the batch axes of x, which may be none. x has the shape (*batch, I) with I input features, and
    h has the shape (*batch, P), where P is the width of the last layer's h.
    """

    def __init__(self, problems: list[Problem], parameters: list[Views], batch: tuple[int, ...]):
        """Prepare the layers; all states are zero. problems: the description of one step, for each layer. parameters:
        a dict of NumPy arrays for each layer, whose memory must not change later."""
        self.layers: list[StreamedLayer] = [
            StreamedLayer(problem, v) for problem, v in zip(problems, parameters, strict=True)
        ]
        self.batch = batch
        self.k: int = 0  # the number of the buffer that holds the current states
        first, last = self.layers[0], self.layers[-1]
        # Views (*batch, .) of both buffers of the first layer's input and of the last layer's h.
        self.x: list[Array] = [self.with_batch_axes(rows) for rows in first.x_rows]
        self.h: list[Array] = [self.with_batch_axes(rows) for rows in last.h]

    def with_batch_axes(self, rows: Array) -> Array:
        """Return a view (*batch, F) of an array [F, B]. An empty array (F = 0), which `reshape` cannot divide, is
        returned unchanged."""
        return rows.T.reshape(*self.batch, -1) if len(rows) else rows

    def __call__(self, x: Array, keep: Array | None = None, inputs: Array | None = None) -> Array:
        """Run one step. Return the last layer's new h (*batch, P), with P its width. The result is a view of a buffer,
        which later steps overwrite.

        x: (*batch, I), in any memory order. A complex x raises a TypeError. keep: factors [B] on the states before the
        step, or None. inputs [B, U H]: the U inputs of this step of a user's cell, or None.
        """
        k = self.k  # the number of the buffer that holds the states before this step
        np.copyto(self.x[k], x)
        if inputs is not None:
            np.copyto(self.layers[0].step.us, inputs.T)  # us: the inputs that a step reads; there is one layer
        with np.errstate(all="ignore"):  # no warnings: exp overflows where a gate is 0, and x may be infinite
            if keep is not None:
                for layer in self.layers:
                    layer.h[k] *= keep
                    layer.c[k] *= keep
            first, *others = self.layers
            h = first.run(k)
            for layer in others:
                np.copyto(layer.x_rows[k], h)
                h = layer.run(k)
        self.k = 1 - k
        return self.h[1 - k]

    def states(self) -> dict[str, list[Array]]:
        """Return views of the current states of all layers by name: h (*batch, P) and, for an LSTM, c (*batch, H)."""
        states = {"h": [self.with_batch_axes(layer.h[self.k]) for layer in self.layers]}
        if len(self.layers[0].c[self.k]):
            states["c"] = [self.with_batch_axes(layer.c[self.k]) for layer in self.layers]
        return states

    def set_states(self, states: dict[str, list[Array]]) -> None:
        """Set the states of all layers. states: for h and, if the cell has it, c one array per layer, of the shape
        (*batch, width)."""
        for name, current in self.states().items():
            for old, new in zip(current, states[name], strict=True):
                np.copyto(old, new)
