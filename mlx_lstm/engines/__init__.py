"""The engines that run a recurrence: one folder per engine, the choice of an engine, and the gradient of a
recurrence in MLX."""

from .choice import ENGINES, FUSED_LIMIT, METAL_ENGINES, Choice, choose

__all__ = ["ENGINES", "FUSED_LIMIT", "METAL_ENGINES", "Choice", "choose"]
