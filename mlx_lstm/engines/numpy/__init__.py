"""Engine `numpy`: the recurrence on the CPU, in place."""
