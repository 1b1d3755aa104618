// Metal's barriers. A caller does not pass `line`: its default value is the line of the call in the kernel. The
// scheduler compares these lines to find out whether all threads wait at the same barrier (../runtime/scheduler.h).
#pragma once
namespace metal {
enum class mem_flags : uint { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
EMU_INLINE constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(uint(a) | uint(b)); }
EMU_INLINE void threadgroup_barrier(mem_flags flags, uint line = __builtin_LINE()) { emu_barrier(1, uint(flags), line); }
EMU_INLINE void simdgroup_barrier(mem_flags flags, uint line = __builtin_LINE()) { emu_barrier(0, uint(flags), line); }
}
