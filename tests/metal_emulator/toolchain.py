"""Run clang and the linker, and manage the cache of their results. Both tools come with zig (`pip install
ziglang==0.17.0`)."""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
_EXTENSIONS = "-all,+cl_khr_fp16,+__opencl_c_generic_address_space"
_WARNINGS = [
    "-Wall",
    "-Wextra",
    "-Wno-unknown-attributes",
    "-Wno-unused",
    "-Wno-sign-compare",
    "-Wno-missing-braces",
    "-Wno-unused-parameter",
    "-Wno-gnu",
    "-Wno-missing-field-initializers",
    "-Wno-user-defined-literals",
    "-Wimplicit-float-conversion",
    "-Wuninitialized",
    "-Wconditional-uninitialized",
    "-Wreturn-type",
    "-Wvla",
    "-Wdouble-promotion",
    "-Wframe-larger-than=65536",
    # MSL 3 is based on C++14. These options warn about newer C++; msl_rules.py decides which warnings are errors.
    "-Wc++20-extensions",
    "-Wpre-c++17-compat",
]
# With these options the compiled kernel calls the runtime (hooks.h) at each load, each store and each undefined
# behaviour.
_CHECKS = [
    "-O1",
    "-fno-vectorize",
    "-fno-slp-vectorize",
    "-mllvm",
    "-tsan-instrument-read-before-write=1",
    "-mllvm",
    "-tsan-instrument-func-entry-exit=0",
    "-fsanitize=thread,bounds,integer-divide-by-zero,signed-integer-overflow,float-cast-overflow,alignment,return",
    "-fno-sanitize-trap=local-bounds",
    "-fsanitize-recover=local-bounds",
    "-ftrivial-auto-var-init=pattern",
    "-gdwarf-4",
    "-gline-tables-only",  # after -gdwarf-4, which alone asks for variables, too
]
# Passes of clang that take more time than the faster code saves: of the optimiser, and of the machine code generator.
_PASSES = "early-cse,indvars,licm,loop-rotate,loop-unroll"
_MACHINE_PASSES = "lsr,cgp,machine-cse,machine-licm,machine-sink,copyprop,peephole,block-placement"
# A kernel runs for milliseconds, so the time to compile it matters. clang optimises nearly as with -O1, but with these
# options it then generates machine code as with -O0. Compiling takes less time than with -O1 alone.
_QUICK_CODE = [
    "-mllvm",
    "-fast-isel",
    "-mllvm",
    "-regalloc=fast",
    "-mllvm",
    "-optimize-regalloc=false",
    # clang can follow variables through the machine code by two methods. The debug information here has lines but no
    # variables, so there is nothing to follow. The method that this option selects then does no work; the other one
    # would.
    "-mllvm",
    "-experimental-debug-variable-locations=false",
    "-mllvm",
    f"-opt-disable={_PASSES}",
    *[word for name in _MACHINE_PASSES.split(",") for word in ("-mllvm", f"-disable-{name}")],
]

# Without unrolled loops a kernel compiles in seven eighths of the time, but some weights are then loaded several times.
KEEP_LOOPS = ["-mllvm", "-opt-disable=loop-unroll-full"]


def require_supported_host() -> None:
    """Raise an error on a machine that the runtime does not support."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise RuntimeError(f"metal_emulator needs Linux on x86-64 but runs on {sys.platform} {platform.machine()}")


def cache_folder() -> Path:
    """Return the folder for compiled kernels. Several processes can use it at the same time."""
    base = os.environ.get("XDG_CACHE_HOME") or (Path.home() / ".cache")
    try:
        folder = Path(base) / "metal_emulator"
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        folder = Path(tempfile.gettempdir()) / f"metal_emulator-{os.getuid()}"
        folder.mkdir(exist_ok=True)
    return folder


def digest(*parts: str) -> str:
    """Return a hash of the texts. The cache uses the hash as a file name."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def sources_text(folder: str) -> str:
    """Return the joined texts of all files in the folder runtime/ or shim/. The cache keys contain a hash of them."""
    return "\0".join(f.read_text() for f in sorted((HERE / folder).glob("*")))


@cache
def zig() -> str:
    """Return the path of the zig executable."""
    import ziglang  # not at the top of the file: on a Mac without ziglang, the other functions still work

    return str(Path(ziglang.__file__).parent / "zig")


@cache
def shim_folder() -> Path:
    """Return the path of a copy of shim/ in the cache. Make the copy if it is missing.

    A precompiled header refers to its sources by path, and this path is part of the cache key of every kernel. All
    checkouts of the project use the copy's path, so they share their compiled kernels. The copy remains when a
    checkout is deleted.
    """
    final = cache_folder() / f"shim-{digest(sources_text('shim'))}"
    if not final.is_dir():
        draft = Path(tempfile.mkdtemp(dir=cache_folder()))
        shutil.copytree(HERE / "shim", draft, dirs_exist_ok=True)
        try:
            draft.rename(final)
        except OSError:  # another process was faster
            shutil.rmtree(draft)
    return final


def front_end(metal_version: int, fast_math: bool) -> list[str]:
    """Return clang's command line for compiling a Metal kernel. clang reads the kernel as C++ for OpenCL, and adds the
    emulator's checks to the machine code."""
    math = ["-DEMU_FAST_MATH"] if fast_math else []
    language = ["-x", "clcpp", "-cl-std=clc++2021", "-cl-no-stdinc", "-Xclang", f"-cl-ext={_EXTENSIONS}"]
    defines = ["-D__METAL__=1", f"-D__METAL_VERSION__={metal_version}", "-D__METAL_MACOS__=1", *math]
    target = ["-mf16c", "-mfma", "-fPIC", "-ffp-contract=off", "-cl-single-precision-constant", "-ferror-limit=20"]
    return [zig(), "clang", *language, *defines, *target, *_WARNINGS, *_CHECKS, *_QUICK_CODE, "-I", str(shim_folder())]


def run_tool(command: list[str], what: str) -> str:
    """Run a command and return its standard output. Raise an error if the command fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{what} failed:\n{done.stderr}")
    return done.stdout


def publish(temporary: Path, final: Path) -> Path:
    """Move a finished file to its final path in one step, so that other processes never see an incomplete file."""
    os.replace(temporary, final)
    return final


@cache
def runtime_library() -> Path:
    """Return the path of the compiled runtime. Compile it if it is not in the cache."""
    require_supported_host()
    final = cache_folder() / f"runtime-{digest(sources_text('runtime'), zig())}.so"
    if not final.exists():
        with tempfile.TemporaryDirectory(dir=cache_folder()) as folder:
            compiled, built = Path(folder) / "runtime.o", Path(folder) / "runtime.so"
            flags = "-O2 -fno-exceptions -fno-rtti -fno-sanitize=all -fvisibility=hidden -fPIC -mf16c -mfma"
            # With a target by name zig takes its own headers of libc, which a machine without a compiler lacks.
            compiling = [zig(), "cc", "-x", "c++", "-target", "x86_64-linux-gnu", *flags.split(), "-c"]
            run_tool([*compiling, str(HERE / "runtime" / "runtime.cpp"), "-o", str(compiled)], "compiling the runtime")
            # Only the linker is called: `zig cc` would first compile its own start code and helper functions, which
            # takes longer than the runtime. Python's process has libc and libm.
            run_tool([zig(), "ld.lld", "-shared", "-o", str(built), str(compiled)], "linking the runtime")
            publish(built, final)
    return final


def precompiled_shim(text: str, options: list[str]) -> Path:
    """Return the precompiled header that contains the shim and `text` (MLX's preamble, already translated for
    clang). Compile the header if it is not in the cache."""
    final = cache_folder() / f"shim-{digest(text, sources_text('shim'), *options)}.pch"
    if not final.exists():
        with tempfile.TemporaryDirectory(dir=cache_folder()) as folder:
            source, built = final.with_suffix(".clcpp"), Path(folder) / "shim.pch"
            draft = Path(folder) / "shim.clcpp"
            draft.write_text('#include "metal_stdlib.h"\n' + text)
            publish(draft, source)
            # The precompiled header must not contain the time stamp of its source: another process may write an
            # identical source while this one uses the header. It contains the instances of its templates, which clang
            # would otherwise make again for every kernel.
            emit = [
                "-fsyntax-only",
                "-fpch-instantiate-templates",
                "-Xclang",
                "-fno-pch-timestamp",
                "-Xclang",
                "-emit-pch",
                "-Xclang",
                "-o",
                "-Xclang",
                str(built),
            ]
            run_tool([*options, *emit, str(source)], "precompiling the shim")
            publish(built, final)
    return final
