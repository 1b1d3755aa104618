"""How a recurrence runs: which engine, and why; its gradient in MLX; an engine per folder."""

from .choice import ENGINES as ENGINES
from .choice import FUSED_LIMIT as FUSED_LIMIT
from .choice import METAL_ENGINES as METAL_ENGINES
from .choice import Choice as Choice
from .choice import choose as choose
