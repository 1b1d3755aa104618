"""Engine `ops`: run the recurrence as a graph of ordinary MLX operations."""
