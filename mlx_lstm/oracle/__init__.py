"""The judge: a recurrence and its gradient in NumPy float64, and what counts as close enough to it."""

from .recurrence import ARRAYS as ARRAYS
from .recurrence import OUTPUTS as OUTPUTS
from .recurrence import activation_arguments as activation_arguments
from .recurrence import backward as backward
from .recurrence import clip_shift as clip_shift
from .recurrence import evaluate as evaluate
from .recurrence import forward as forward
