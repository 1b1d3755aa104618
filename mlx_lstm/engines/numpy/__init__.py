"""Engine `numpy`: run the recurrence on the CPU with NumPy, writing directly into the memory of MLX arrays."""
