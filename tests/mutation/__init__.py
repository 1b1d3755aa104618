"""Plant small errors (slips) in changed lines of the library and its shaders, and print those that no test notices.

mutmut traces the complete suite before it starts, cosmic-ray runs one command for every slip, and neither reads Metal.
So this tool has its own slips, and it chooses the tests by the lines that they ran in a recorded run, or by imports."""
