"""The oracle: a slow NumPy float64 implementation of each recurrence and its gradient, and bounds on the errors that
a correct result may have. Tests and commands compare the results of all engines and other libraries with the oracle's
results."""

from .case import ARRAYS, OUTPUTS, Call
from .recurrence import activation_arguments, backward, clip_shift, evaluate, forward, kink_distance

__all__ = ["ARRAYS", "OUTPUTS", "Call", "activation_arguments", "backward", "clip_shift", "evaluate", "forward"]
__all__ += ["kink_distance"]
