// The runtime of the Metal emulator: it runs the threads of a compiled kernel on the CPU and checks each memory access.
// All parts are compiled as one file, so that the compiler can inline the checks into the functions that a kernel
// calls.
//   base.h       types and the state of the launch          fibers.h     threads: a stack each, and the switch
//   findings.h   the list of findings (defects)             memory.h     buffers, threadgroup variables, their cells
//   checks.h     bounds, initialisation, races              hooks.h      functions that clang makes a kernel call
//   simdgroup.h  exchange between lanes, matrices           scheduler.h  order of threads, barriers, divergence
//   math.h       float functions                            host.h       functions that Python and the entry point call
// The runtime does not use the C++ library: it is compiled with -fno-exceptions -fno-rtti, and calls functions of
// libc and libm only.
#include "host.h"
