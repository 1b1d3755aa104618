"""Engine `ops`: the recurrence in plain MLX."""
