"""How a recurrence runs: which engine, and why; its gradient in MLX; an engine per folder."""

from .choice import ENGINES, FUSED_LIMIT, METAL_ENGINES, Choice, choose

__all__ = ["ENGINES", "FUSED_LIMIT", "METAL_ENGINES", "Choice", "choose"]
