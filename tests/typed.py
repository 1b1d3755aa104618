"""`make lint`: how many public names say their types. Fails below LEAST, and where a function lacks an annotation.

The way to 100 % is barred by MLX: its `nn` is not among what `basedpyright --verifytypes` can read.
"""

import json
import os
import subprocess
import sys

LEAST = 0.95
OPTIONS = ("--pythonpath", sys.executable, "--outputjson", "--ignoreexternal", "--verifytypes", "mlx_lstm")


def main():
    """Print what is wrong and the score; the exit code."""
    # An editable install puts the shaders in a folder of the package's name, which would be found before the package.
    path = os.environ | {"PYTHONPATH": "."}
    done = subprocess.run([sys.executable, "-m", "basedpyright", *OPTIONS], env=path, capture_output=True, text=True)
    types = json.loads(done.stdout)["typeCompleteness"]
    partly = [symbol for symbol in types["symbols"] if symbol["isExported"] and not symbol["isTypeKnown"]]
    reasons = [f"{symbol['name']}: {why['message']}" for symbol in partly for why in symbol["diagnostics"]]
    missing = [reason for reason in reasons if reason.endswith("is missing")]
    score = types["completenessScore"]
    print(*(reasons if score < LEAST else missing), f"public names with their types: {score:.1%}", sep="\n")
    return score < LEAST or bool(missing)


if __name__ == "__main__":
    sys.exit(main())
