"""Count what the shaders cost on an Apple GPU, in the machine code of an independent compiler; see README.md."""
