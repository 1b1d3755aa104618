// The runtime of the Metal emulator, one translation unit so that the memory checks can be inlined into the hooks.
//   base.h       types and the state of the dispatch        fibers.h     a stack and a switch per thread
//   findings.h   the list of findings                       memory.h     buffers, threadgroup variables, shadow cells
//   checks.h     bounds, initialisation, races              hooks.h      entry points of clang's instrumentation
//   simdgroup.h  exchange between lanes, matrices           scheduler.h  orders, barriers, divergence
//   math.h       float functions                            host.h       what Python and the entry stub call
// No C++ library: built with -fno-exceptions -fno-rtti and linked to libc and libm only.
#include "host.h"
