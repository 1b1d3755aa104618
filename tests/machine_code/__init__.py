"""What the shaders cost on an Apple GPU, counted in the machine code of an independent compiler; see README.md."""
