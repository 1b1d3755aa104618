"""Assertions on results and on random cases. The allowed errors are those of `mlx_lstm.oracle.closeness`."""

import numpy as np

from mlx_lstm.oracle.arithmetic import ACTIVATION_UNITS
from mlx_lstm.oracle.closeness import Noise, bounds_of, exact_and_bounds, float_of
from mlx_lstm.oracle.recurrence import KINKS, activation_arguments, evaluate
from mlx_lstm.oracle.verdict import judged, largest, widest


def assert_close(name, got, same_dtype, ref64):
    """Assert that the error of `got` is at most twice the error of `same_dtype`, plus a small floor for
    rounding. Both errors are distances from the float64 result `ref64`. `same_dtype` is the result of the same formula
    in the dtype of `got`.

    max|got - ref64| <= 2 max|same_dtype - ref64| + 4 eps * max|ref64|. A NaN, a wrong shape or a wrong dtype
    fails.
    """
    same_dtype = np.asarray(same_dtype)
    floor = 4 * float_of(same_dtype.dtype).eps * largest(ref64)
    bound = 2 * largest(same_dtype.astype(np.float64) - ref64) + floor
    assert_within(name, got, ref64, bound, same_dtype.dtype)


def assert_within(name, got, ref64, bound, dtype=None):
    """Assert |got - ref64| <= bound, where `bound` is one number or one number per element. A value that is not finite,
    a wrong shape or another dtype than `dtype` fails."""
    got, ref64 = np.asarray(got), np.asarray(ref64)
    if ref64.dtype != np.float64 or not np.isfinite(ref64).all() or not np.isfinite(bound).all():
        rule = "the reference must be finite float64 and the bound finite"
        raise AssertionError(f"{name}: {rule}, got {ref64.dtype}, {bound}")
    verdict = judged(name, got, ref64, bound, dtype)
    if verdict.refusal:
        where = verdict.first is not None and f" at {list(verdict.at)}: got {got[verdict.at]!s}, expected "
        raise AssertionError(f"{name}: {verdict.refusal}" + (f"{where}{ref64[verdict.at]:.9g}" if where else ""))


def bounds(case, dtype, cotangents=None):
    """Return {name: bound}: the largest error that a right implementation in `dtype` may have in each output of a case
    and, if cotangents are given, in each gradient, which is named like its argument."""

    def values(fl):
        outputs, gradients = evaluate(case, cotangents, fl)
        return outputs | gradients

    return bounds_of(values, dtype)


def keeps_off_kinks(case, dtype):
    """Return whether no rounding in `dtype` can move an argument of relu, a hard sigmoid or a clip that stops gradients
    across a kink. At a kink the gradient jumps, so it has no error bound. The argument of a clip is divided by the
    clip's limit, so that the kinks are at -1 and 1.

    An argument that is not 0 must be farther from each kink than the sum of two distances. The first is the argument's
    error bound times `Noise.gain`. This factor is needed because bounds are computed with random errors that are `gain`
    times as large as real ones. These errors must not move an argument across a kink, either. The second distance
    covers the error of the activation function itself: a hard sigmoid has the slope 1 / (2 |kink|), so an error e of
    its result is like a shift of the argument by 2 |kink| e. An argument that is exactly 0 stays 0 when it is rounded.
    """
    names = [name for name, _ in activation_arguments(**case)]
    if not KINKS.keys() & set(names):
        return True
    exact, limit = exact_and_bounds(
        lambda fl: {str(n): a for n, (_, a) in enumerate(activation_arguments(fl=fl, **case))}, dtype
    )
    noise, limit = Noise(dtype, seed=0, systematic=False), widest(limit)
    own = noise.unit + ACTIVATION_UNITS * noise.accumulator_unit
    return all(
        (np.abs(exact[str(n)][exact[str(n)] != 0] - kink) > noise.gain * limit[str(n)] + 2 * abs(kink) * own).all()
        for n, name in enumerate(names)
        for kink in KINKS.get(name, ())
    )
