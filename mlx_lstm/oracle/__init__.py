"""The oracle: each recurrence and its gradient in NumPy float64, and the largest errors that a correct result may
have."""

from .case import ARRAYS, OUTPUTS, Case
from .recurrence import activation_arguments, backward, clip_shift, evaluate, forward, kink_distance

__all__ = ["ARRAYS", "OUTPUTS", "Case", "activation_arguments", "backward", "clip_shift", "evaluate", "forward"]
__all__ += ["kink_distance"]
