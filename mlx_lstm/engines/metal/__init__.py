"""Engines `fused` and `stepwise`: the recurrence in our Metal shaders."""
