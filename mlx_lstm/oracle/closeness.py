"""The tolerances of all tests and commands: a result may differ from the float64 oracle only as much as rounding
explains. The bounds are derived from the inputs alone. No number in this file is fitted to the results of an engine: if
a check fails, look for the error in the engine. A trial is one evaluation of a function `values`, which computes
results by name in the arithmetic of a `Rounding`, with random errors in all operations."""

from collections.abc import Callable
from functools import lru_cache, partial
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from .arithmetic import Array, Rounding, Tensors
from .verdict import Bound, Judge, largest, widest

Values = Callable[[Rounding], Tensors]

TRIALS = 8
SAFETY = 4
LARGE, FEW = 100_000, 2
"""How many evaluations with random errors find an error bound. For a tensor with at least LARGE elements FEW are
enough. For other tensors FEW run first, and the rest of TRIALS only if the error of a result is above the bound from
FEW. SAFETY: the factor between the largest observed change and the bound."""


class Float(NamedTuple):
    """The constants of a floating-point dtype. eps: the distance from 1 to the next larger number. tiny: the smallest
    normal number. smallest: the smallest subnormal number."""

    eps: float
    tiny: float
    smallest: float


FLOATS = {
    "float64": Float(2.0**-52, 2.0**-1022, 2.0**-1074),
    "float32": Float(2.0**-23, 2.0**-126, 2.0**-149),
    "float16": Float(2.0**-10, 2.0**-14, 2.0**-24),
    "bfloat16": Float(2.0**-7, 2.0**-126, 2.0**-133),
}


def float_of(dtype: DTypeLike) -> Float:
    """Return the rounding constants of a dtype, or of its name, since NumPy does not have bfloat16."""
    return FLOATS[dtype if isinstance(dtype, str) else np.dtype(dtype).name]


def bounds_of(values: Values, dtype: DTypeLike) -> dict[str, float]:
    """Return {name: bound}: the largest error that each result may have in `dtype`. `exact_and_bounds` derives the
    bounds. values: a function that computes the results in the arithmetic of a `Rounding`."""
    return widest(exact_and_bounds(values, dtype).bounds)


def trials_for(elements: int) -> int:
    """Return how many evaluations with random errors find the bounds of a case. elements: the number of elements of its
    largest tensor."""
    return TRIALS if elements < LARGE else FEW


def exact_and_bounds(values: Values, dtype: DTypeLike, trials: int = TRIALS) -> Judge:
    """Return a `Judge` (exact, bounds), two dicts by name: the results that `values` computes in float64, and for each
    result the largest error that a correct implementation in `dtype` may have, as a `Bound`. trials: the number of
    evaluations with random errors. A bound comes from the largest change in any of them, so with fewer evaluations it
    is equal or narrower.

    The bounds depend only on the case, not on any engine. The arrays of the case must have values that `dtype` can
    represent. They must also keep the arguments of relu and hard_sigmoid away from their kinks, where rounding makes a
    gradient jump.

    First-order error analysis says that the error of a result is the sum, over all operations, of the operation's error
    times the result's sensitivity to this error. The errors have known limits, with u the unit roundoff of `dtype` and
    v the unit roundoff of the accumulator (`Rounding`):

        + - * /, storing        u |result|
        activation              4 ulp = 8 v |result|, then stored
        dot, sum of K terms     v sqrt(K) sum|terms|, in any order, then stored (Higham and Mary, SIAM J. Sci. Comput.,
                                2019: roundings are not all of one sign, so the K of the worst case becomes sqrt(K))
        dot, quantized weights  in addition v sqrt((n + 4) sum over the groups of (C X)^2), explained below
        z a + (1 - z) b         u (|z a| + 2 |(1 - z) b| + |result|), or as b + z (a - b): u (2 |z (a - b)| + |result|);
                                an engine may use either formula, so the larger limit applies
        underflow               the smallest subnormal of `dtype`, or the smallest normal of the accumulator if larger

    A group of quantized weights has n weights of the form scale q + bias. Each weight has its own integer q; scale and
    bias are the same for the group. A kernel may compute two sums over the group, S = sum (2^f + q) x and s = sum x,
    and then scale (S - 2^f s) + bias s. Here f, 4 or 8, is the number of bits that q takes: a kernel may write these
    bits to the top of the mantissa of a float16 whose exponent stands for 2^f; the float16 is then 2^f + q, without a
    conversion. Partial sums of S and s may be larger than the result, and round with larger errors. X is the largest
    possible |partial sum| of s: the larger one of the sum of the positive x and the sum of the negative |x|. C X is a
    limit for the partial sums, multiplied by their factors in the result: C^2 = (2 scale 2^f)^2 + (scale 2^f +
    |bias|)^2. The case passes C as the imaginary part of the first weight of each group.

    The sensitivities must come from the true Jacobian, whose terms cancel. A bound from their absolute values would
    grow exponentially in T and allow any result. So the sum is sampled, as the method CESTAC does: the float64 oracle
    is evaluated with a random error added to every operation, between half of its limit and the whole limit, of either
    sign. Each such evaluation is a trial. Half of the trials repeat the same errors at each time step, because the
    error of an activation function may be the same at each step. The largest change of a result over all trials (TRIALS
    of them) is about twice the root of the sum of squares of the terms. SAFETY times this change covers the worst case
    of up to 36 equal terms, in which all their errors have the same sign. Another eps max|result| is added in case all
    random errors cancel.
    """
    changes = Changes(values, dtype)

    def bound(name: str, trials: int) -> float:
        return SAFETY * largest(changes.of(trials)[name]) + changes.floor(largest(changes.exact[name]))

    names = [*changes.exact]
    return Judge(changes.exact, {k: Bound(bound(k, min(FEW, trials)), partial(bound, k, trials)) for k in names})


def exact_and_element_bounds(values: Values, dtype: DTypeLike) -> Judge:
    """Return a `Judge` like `exact_and_bounds`, but with a bound for each element, which may be narrower: SAFETY times
    the largest change that random errors in all operations make to this element alone, plus `floor`."""
    changes = Changes(values, dtype)
    moved = changes.of(TRIALS)
    return Judge(changes.exact, {k: SAFETY * moved[k] + changes.floor(np.abs(a)) for k, a in changes.exact.items()})


class Changes:
    """The results of the function `values` in float64 (exact), and how much random errors change them: moved, the
    largest change of each element in the `done` evaluations with random errors so far."""

    def __init__(self, values: Values, dtype: DTypeLike):
        self.values, self.dtype = values, dtype
        self.exact: Tensors = values(Rounding(np.float64))
        self.moved: Tensors = {name: np.zeros(np.shape(value)) for name, value in self.exact.items()}
        self.done: int = 0

    def of(self, trials: int) -> Tensors:
        """Evaluate `values` with random errors, until `trials` such evaluations have run in all. Return for each
        element of the results its largest change in any of them."""
        for trial in range(self.done, trials):
            # systematic: every second trial repeats its errors at each time step.
            noise = Noise(self.dtype, seed=trial, systematic=trial % 2 == 1)
            for name, value in self.values(noise).items():
                # gain: by which factor the added errors were larger than real ones. np.maximum returns NaN if one of
                # both is NaN.
                self.moved[name] = np.maximum(self.moved[name], np.abs(value - self.exact[name]) / noise.gain)
            self.done = trial + 1
        return self.moved

    def floor(self, size: Any) -> Any:
        """Return the part of a bound that is added in case all random errors cancel, for a number of this size: eps
        times the size, plus the error that underflow may cause."""
        stored = float_of(self.dtype)
        return stored.eps * size + Noise(self.dtype, seed=0, systematic=False).underflow


FIRST = 2**16
"""How many random errors of each seed are cached. The trials of all cases use the same few seeds, and a small case
needs no more errors."""


def errors(rng: np.random.Generator, shape: int | tuple[int, ...]) -> Array:
    """Return random numbers of either sign, whose absolute values are between 1 / 2 and 1."""
    part = rng.uniform(-1.0, 1.0, shape)
    return (part + np.copysign(1.0, part)) / 2


@lru_cache(64)
def first_errors(seed: int) -> Array:
    """Return the first FIRST random errors of a generator with this seed."""
    return errors(np.random.default_rng(seed), FIRST)


class Noise(Rounding):
    """float64 arithmetic that adds a random error to every result, about as large as the error that an operation in
    `dtype` may have.

    If `dtype` is float64, real errors (about 2^-53) could not be distinguished from the oracle's own rounding. So the
    added errors are `gain` times larger, about 2^-26. The first FIRST errors of a seed come from a cache, to save time.
    """

    def __init__(self, dtype: DTypeLike, seed: int, systematic: bool):
        super().__init__(np.float64)
        stored = float_of(dtype)
        accumulated = stored if stored is FLOATS["float64"] else FLOATS["float32"]
        unit = stored.eps / 2
        self.gain: float = max(1.0, 2.0**-26 / unit)
        self.unit: float = self.gain * unit
        self.accumulator_unit: float = self.gain * accumulated.eps / 2
        self.underflow: float = max(stored.smallest, accumulated.tiny)
        self.systematic: bool = systematic  # whether the random errors are the same at every time step
        self.seed: int = seed
        self.drawn: int = 0  # how many random errors have been used
        self.rng: np.random.Generator | None = None  # draws the errors beyond the first FIRST ones, which are cached

    def start_step(self) -> None:
        if self.systematic:  # use the same errors as at the previous step
            self.drawn, self.rng = 0, None

    def load(self, value: Array) -> Array:
        return np.asarray(value).astype(np.complex128 if np.iscomplexobj(value) else np.float64)

    def move(self, limit: Array) -> Array:
        """Return random errors of either sign, whose absolute values are between limit / 2 and limit. They are the next
        random numbers of this seed: from the cache of its first FIRST numbers or, beyond these, from a generator."""
        shape = np.shape(limit)
        start, self.drawn = self.drawn, self.drawn + prod(shape)
        if self.drawn <= FIRST:
            return limit * first_errors(self.seed)[start : self.drawn].reshape(shape)
        if self.rng is None:
            self.rng = np.random.Generator(np.random.PCG64(self.seed).advance(start))
        return limit * errors(self.rng, shape)

    def __call__(self, value: Array | float, units: int = 0) -> Array:
        limit = (self.unit + units * self.accumulator_unit) * np.abs(value)
        limit += self.underflow
        if np.count_nonzero(value) < limit.size:  # add no error to an exact 0, which would cross the kink of relu
            limit = np.where(value == 0, 0.0, limit)
        return value + self.move(limit)

    def dot(self, a: Array, b: Array) -> Array:
        errors = np.sqrt(a.shape[-1]) * (np.abs(a) @ np.abs(np.real(b)))
        if np.iscomplexobj(b):
            errors += errors_of_groups(a, np.imag(b))
        return self(a @ np.real(b) + self.move(self.accumulator_unit * errors))

    def total(self, terms: Array, axis: tuple[int, ...]) -> Array:
        K = np.prod([terms.shape[n] for n in axis])
        spread = np.abs(terms).sum(axis=axis, keepdims=True)
        return self(terms.sum(axis=axis, keepdims=True) + self.move(self.accumulator_unit * np.sqrt(K) * spread))

    def blend(self, z: Array, a: Array, b: Array) -> Array:
        products = np.abs(z * a) + 2 * np.abs((1.0 - z) * b)
        return self(z * a + (1.0 - z) * b + self.move(self.unit * np.maximum(products, 2 * np.abs(z * (a - b)))))


def errors_of_groups(a: Array, factors: Array) -> Array | float:
    """Return the additional rounding errors [M, N] of the product a [M, K] @ b [K, N] if the weights b are
    quantized, in unit roundoffs of the accumulator.

    Quantized weights form groups, and the weights of a group share a scale. A kernel may sum over a group before it
    applies the scale. Such a sum is larger than the group's part of the product, so its rounding errors are larger,
    too. `factors` [K, N] says how much larger: it has a factor in the row of the first weight of each group, and 0 in
    all other rows. `exact_and_bounds` gives the formula.

    If the groups lie along N instead of K, return 0: a kernel then multiplies b like a matrix that is not quantized.
    """
    starts = np.flatnonzero((factors != 0).any(axis=1))
    if len(starts) == len(factors):
        return 0.0
    positive, negative = (np.add.reduceat(np.maximum(sign * a, 0), starts, axis=1) for sign in (1, -1))
    # The n weights of a group, and the 4 operations of scale (S - 2^f s) + bias s that round: -, + and two products.
    roundings = a.shape[-1] // len(starts) + 4
    return np.sqrt(roundings * (np.maximum(positive, negative) ** 2 @ factors[starts] ** 2))
