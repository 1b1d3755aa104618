"""Check types; `make lint` runs this file. basedpyright reads the library and every Python block of the docs. At the
same time it computes the share of public names whose types are known. The run fails if a type is wrong, if the share is
below LEAST or if a function lacks an annotation.

The share cannot reach 100 %: `basedpyright --verifytypes` cannot read the types of MLX's `nn`.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
from test_docs import PYTHON, ROOT

LEAST = 0.95 if np.lib.NumpyVersion(np.__version__) >= "2.3.0" else 0.0  # older ones, as for Python 3.10, lack types
CHECKER = (sys.executable, "-m", "basedpyright", "--pythonpath", sys.executable)
OPTIONS = ("--outputjson", "--ignoreexternal", "--verifytypes", "mlx_lstm")
BLOCKS = ROOT / "build" / "blocks"
"""The folder of the docs' Python blocks, one of those that pyproject.toml names to basedpyright."""


def main():
    """Check the types of the package and of the blocks in docs. Print the errors, the missing annotations, and the
    share of public names that have a type. Return whether a check failed: True becomes the exit code 1."""
    write_blocks()
    with subprocess.Popen([*CHECKER, "-p", str(ROOT)], stdout=subprocess.PIPE, text=True) as checks:
        failed = is_untyped()
        print(checks.communicate()[0], end="")
    return failed or checks.returncode != 0


def write_blocks():
    shutil.rmtree(BLOCKS, ignore_errors=True)
    BLOCKS.mkdir(parents=True)
    for block in PYTHON:
        name = re.sub(r"\W", "_", f"{block.page.removesuffix('.md')}_line{block.line}")
        Path(BLOCKS, f"{name}.py").write_text(block.text)


def is_untyped():
    """Print the missing annotations and the share of public names with a known type. Return whether they fail the
    run."""
    # An editable install contains a folder `mlx_lstm` with only the shaders. PYTHONPATH makes the checker find the
    # source package first.
    # `--verifytypes` looks for packages with the `python` on PATH, whatever `--pythonpath` says.
    folders = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
    own = os.environ | {"PYTHONPATH": ".", "PATH": folders}
    done = subprocess.run([*CHECKER, *OPTIONS], env=own, capture_output=True, text=True)
    types = json.loads(done.stdout)["typeCompleteness"]
    partly = [symbol for symbol in types["symbols"] if symbol["isExported"] and not symbol["isTypeKnown"]]
    reasons = [f"{symbol['name']}: {why['message']}" for symbol in partly for why in symbol["diagnostics"]]
    missing = [reason for reason in reasons if reason.endswith("is missing")]
    score = types["completenessScore"]
    print(*(reasons if score < LEAST else missing), f"public names with their types: {score:.1%}", sep="\n")
    return score < LEAST or bool(missing)


if __name__ == "__main__":
    sys.exit(main())
