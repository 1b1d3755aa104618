"""The engines `fused` and `stepwise`, which run the recurrence on the GPU in Metal shaders."""
