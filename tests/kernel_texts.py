"""Write every kernel that `mlx_lstm.check --full` compiles to a complete .metal file: `python -m kernel_texts
FOLDER`. MLX generates the source exactly as Apple's compiler receives it. Neither Metal nor a Mac is needed.

Apple's compiler can then check the files on a Mac without using the GPU:

    PYTHONPATH=tests python -m kernel_texts kernels --compile "xcrun -sdk macosx metal -std=metal3.1 -c"
"""

import argparse
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest.mock import patch

import mlx.core as mx
from metal_emulator.dropin import EmulatedKernel
from metal_emulator.preamble import preamble_text

from mlx_lstm.check.cells import FORMS, NORMED, verdict
from mlx_lstm.engines import METAL_ENGINES, choice
from mlx_lstm.engines.metal import kernel
from mlx_lstm.lab.cases import run
from mlx_lstm.lab.engines.grid import grid
from mlx_lstm.lab.report import one_line
from mlx_lstm.recurrence import unguarded


class Noted(EmulatedKernel):
    """A kernel that does not run. A call counts a launch of the kernel's source and returns zeros."""

    def __init__(self, texts, **definition):
        super().__init__(**definition)
        self.texts = texts

    def __call__(self, *, inputs, **call):
        self.texts[self._capture(inputs, call).source] += 1
        outputs = zip(call["output_shapes"], call["output_dtypes"], strict=True)
        return [mx.zeros(shape, dtype) for shape, dtype in outputs]


@contextmanager
def noted():
    """Make the library work as on a Mac inside the context, but run no kernel. Yield a Counter whose keys become the
    sources of the kernels that are called, with the number of calls. The usual small test run before a kernel's first
    use is left out."""
    texts = Counter()
    kernel.forget()
    with (
        patch.object(mx.fast, "metal_kernel", partial(Noted, texts)),
        patch.object(choice, "has_metal", lambda: True),
        patch.object(choice, "current_device", lambda: "gpu"),
        unguarded(),
    ):
        yield texts
    kernel.forget()


def kernel_texts(cases):
    """Return the sources of all kernels that these cases launch, in the order of their first launch."""
    with noted() as texts:
        for grid_case in cases:
            case = grid_case.draw()
            for engine in METAL_ENGINES:
                if not grid_case.hindrance(engine, device="gpu", metal=True):
                    with grid_case.limits():
                        run(case, engine)
                        run(case, engine, training=False)
    return list(texts)


def generated_texts():
    """Return the sources of the kernels that the library generates for the cells in `mlx_lstm.cells`."""
    with noted() as texts:
        assert not any(verdict(form, engine) for form in FORMS + NORMED for engine in METAL_ENGINES)
    return list(texts)


def family(text):
    """Return a kernel's name without its options. Kernels whose sources differ only in options belong to one family."""
    return re.sub(r"_without_.*|__.*", "", name_of(text))


def name_of(text):
    """Return the name of the kernel function that MLX launches."""
    return re.search(r"void custom_kernel_(\w+)\(", text)[1]


def write(folder, texts):
    """Write one file per kernel. Return the number of kernels in each family."""
    folder.mkdir(parents=True, exist_ok=True)
    names = Counter()
    for text in texts:
        names[family(text)] += 1
        file = folder / f"{family(text)}_{names[family(text)]}.metal"
        file.write_text(f"{preamble_text()}{text}")
    return names


def compile_each(command, folder):
    """Compile each file. Return the compiler's output for each refused file. Print each different first error to
    stderr, with the number of kernels that have it."""

    def compiled(file):
        done = subprocess.run([*command, str(file), "-o", os.devnull], capture_output=True, text=True)
        file.with_suffix(".log").write_text(done.stderr)
        return done.returncode, done.stderr

    files = sorted(folder.glob("*.metal"))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        said = dict(zip(files, pool.map(compiled, files), strict=True))
    refused = {file: text for file, (code, text) in said.items() if code}
    same = Counter(one_line(text) for text in refused.values())
    for text, count in same.most_common():
        print(f"{count} kernels: {text}", file=sys.stderr)
    print(f"{len(files) - len(refused)} of {len(files)} compiled by {shlex.join(command)}")
    return refused


def make_parser():
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser("python -m kernel_texts", description="Write every kernel as a .metal file.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--short", action="store_true", help="only those that check compiles without --full")
    parser.add_argument("--compile", metavar="COMMAND", help="a compiler to call with each file; its words: *.log")
    return parser


def main():
    """Write the files, print the number of kernels in each family, and return the exit code."""
    options = make_parser().parse_args()
    texts = kernel_texts(grid(full=not options.short)) + ([] if options.short else generated_texts())
    names = write(options.folder, dict.fromkeys(texts))
    print("\n".join(f"{count:5} {name}" for name, count in sorted(names.items())))
    print(f"{names.total():5} kernels of {len(names)} families, written to {options.folder}", flush=True)
    return 1 if options.compile and compile_each(shlex.split(options.compile), options.folder) else 0


if __name__ == "__main__":
    sys.exit(main())
