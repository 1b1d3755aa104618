"""Compile the source that MLX generates for a Metal kernel to machine code of the M1's GPU. The steps: Metal to C++
for OpenCL (here), to LLVM (clang), to SPIR-V (llvm-spirv), to machine code (Mesa's compiler)."""

import os
import re
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

from metal_emulator import lowering

HERE = Path(__file__).resolve().parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mlx-lstm/agx"
MESA = CACHE / "build/src/asahi/clc/asahi_clc"
LLVM = Path("/usr/lib/llvm-15/bin")

# OpenCL's expression for each value that Metal provides for a thread. %d stands for the axis: 0, 1 or 2.
ATTRIBUTES = {
    "thread_position_in_grid": "get_global_id(%d)",
    "threads_per_grid": "get_global_size(%d)",
    "thread_position_in_threadgroup": "get_local_id(%d)",
    "threadgroup_position_in_grid": "get_group_id(%d)",
    "threads_per_threadgroup": "get_local_size(%d)",
    "threadgroups_per_grid": "get_num_groups(%d)",
    "thread_index_in_threadgroup": "get_local_id(0)",
    "thread_index_in_simdgroup": "(get_local_id(0) & 31)",
    "simdgroup_index_in_threadgroup": "(get_local_id(0) >> 5)",
}

CLANG = (
    "-x clcpp -cl-std=clc++2021 -cl-no-stdinc -target spir64 -O2 -Xclang -disable-llvm-passes -ffp-contract=fast -w "
    "-emit-llvm -S"
)

# LLVM passes: inline functions, turn small arrays into scalars, unroll loops. The pass instcombine is left out, since
# it creates integers of unusual bit widths, which SPIR-V does not support.
PASSES = (
    "forceattrs,always-inline,function(sroa,early-cse<memssa>,simplifycfg,loop-simplify,lcssa,loop(loop-rotate,indvars),"
    "loop-unroll<O2;full-unroll-max=64>,sroa,early-cse<memssa>,sccp,simplifycfg,loop-simplify,lcssa,loop(indvars),"
    "loop-unroll<O2>,sroa,early-cse<memssa>,sccp,gvn,loop-simplify,lcssa,loop-mssa(licm),simplifycfg,adce),globaldce"
)


def machine_code(text: str, threads: int) -> str:
    """Compile a kernel and return what Mesa's compiler prints: statistics, and the machine code at several stages.
    text: the kernel's Metal source. threads: the number of threads per threadgroup, which decides how many registers
    a thread gets."""
    with TemporaryDirectory() as folder:
        source, code, spirv = (f"{folder}/kernel{end}" for end in (".clcpp", ".ll", ".spv"))
        Path(source).write_text(opencl(text, threads))
        run(LLVM / "clang", *CLANG.split(), source, "-o", code)
        # clang makes a template function internal if a template argument is a struct that is defined inside the kernel.
        # LLVM does not unroll a loop around the only call of an internal function, since it expects to inline the
        # function first. So change the linkage of all such functions.
        Path(code).write_text(Path(code).read_text().replace("define internal ", "define linkonce_odr "))
        run(LLVM / "opt", "-S", "-force-attribute=alwaysinline", f"-passes={PASSES}", code, "-o", code)
        # Remove LLVM's instruction freeze and its marks lifetime and noalias, which the translator to SPIR-V does not
        # support.
        llvm = re.sub(r"= freeze (\S+|<[^>]*>) (\S+)$", r"= bitcast \1 \2 to \1", Path(code).read_text(), flags=re.M)
        Path(code).write_text(re.sub(r"^.*@llvm\.(?:lifetime|experimental\.noalias).*$\n", "", llvm, flags=re.M))
        run(LLVM / "opt", "-passes=lowerswitch", code, "-o", code)
        run("llvm-spirv-15", "--spirv-max-version=1.4", code, "-o", spirv)
        debug = os.environ | {"AGX_MESA_DEBUG": "shaderdb,shaders,internal"}
        return run(MESA, spirv, f"{folder}/kernel.h", f"{folder}/kernel.c", env=debug)


def run(*command: str | Path, env: dict[str, str] | None = None) -> str:
    """Run a command and return its stderr followed by its stdout. Raise RuntimeError if the command fails."""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=env)
    if done.returncode:
        raise RuntimeError(f"{Path(command[0]).name}: {done.stderr[:2000]}")
    return done.stderr + done.stdout


def opencl(text: str, threads: int) -> str:
    """Translate the source of a Metal kernel to C++ for OpenCL. threads: the number of threads per threadgroup."""
    code = lowering.blank_comments(text)
    signature = next(lowering.SIGNATURE.finditer(code))
    start = code.find("{", signature.end())
    body = text[start + 1 : lowering.matching(code, start + 1, "{", "}") - 1]
    buffers, attributes = [], []
    for parameter in lowering.kernel_parameters(code, signature):
        if parameter.attribute == "buffer":
            kind = parameter.type.replace("const constant", "constant const").replace("const device", "device const")
            buffers.append(f"{kind} {parameter.name}")
        else:
            attributes.append(attribute(parameter))
    # MLX writes the attribute `kernel` before the signature, and our source defines a macro `kernel` that adds a limit
    # of threads. OpenCL does not support this limit, so delete the lines that define and undefine the macro.
    word = re.compile(r"^\s*#\s*(?:define|undef)\s+kernel\b.*$", re.M)
    head, body = (word.sub("", part) for part in (text[: signature.start()], body))
    size = f"__attribute__((reqd_work_group_size({threads}, 1, 1)))"
    kernel = f"{size} __kernel void k({', '.join(buffers)}) {{\n{' '.join(attributes)}\n{body}\n}}\n"
    source = f"{head}\n{kernel}"
    edits = lowering.text_edits(lowering.blank_comments(source))
    return f'#include "{HERE}/shim.h"\n{lowering.apply_edits(source, edits)}'


def attribute(parameter: lowering.Parameter) -> str:
    """Return a C++ declaration that replaces one parameter of a Metal kernel. It declares a variable with the value
    that Metal passes for the parameter, such as the position of the thread in the grid."""
    scalar, axes = re.match(r"(?:const\s+)?(u?short|u?int)([23])?$", parameter.type).groups()
    form = ATTRIBUTES[parameter.attribute]
    each = [f"({scalar}){form % axis if '%' in form else form}" for axis in range(int(axes or 1))]
    value = each[0] if len(each) == 1 else f"{scalar}{axes}({', '.join(each)})"
    return f"{parameter.type} {parameter.name} = {value};"
