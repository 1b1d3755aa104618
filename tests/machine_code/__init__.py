"""Count the instructions of our Metal kernels in the machine code of Mesa's compiler for Apple's GPUs. README.md
says how."""
