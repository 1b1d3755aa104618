"""Compute the share of public names whose types are known to the type checker; `make lint` runs this file. It fails
if the share is below LEAST or if a function lacks an annotation.

The share cannot reach 100 %: `basedpyright --verifytypes` cannot read the types of MLX's `nn`.
"""

import json
import os
import subprocess
import sys

LEAST = 0.95
OPTIONS = ("--pythonpath", sys.executable, "--outputjson", "--ignoreexternal", "--verifytypes", "mlx_lstm")


def main():
    """Print the missing annotations and the share of typed names. Return True (exit code 1) on failure, otherwise
    False."""
    # An editable install contains a folder `mlx_lstm` with only the shaders. PYTHONPATH makes the checker find the
    # source package first.
    # `--verifytypes` looks for packages with the `python` on PATH, whatever `--pythonpath` says.
    folders = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
    own = os.environ | {"PYTHONPATH": ".", "PATH": folders}
    done = subprocess.run([sys.executable, "-m", "basedpyright", *OPTIONS], env=own, capture_output=True, text=True)
    types = json.loads(done.stdout)["typeCompleteness"]
    partly = [symbol for symbol in types["symbols"] if symbol["isExported"] and not symbol["isTypeKnown"]]
    reasons = [f"{symbol['name']}: {why['message']}" for symbol in partly for why in symbol["diagnostics"]]
    missing = [reason for reason in reasons if reason.endswith("is missing")]
    score = types["completenessScore"]
    print(*(reasons if score < LEAST else missing), f"public names with their types: {score:.1%}", sep="\n")
    return score < LEAST or bool(missing)


if __name__ == "__main__":
    sys.exit(main())
