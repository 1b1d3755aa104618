"""Count the public names with type annotations (`make lint`). Fail if the share is below LEAST, or if a function
lacks an annotation.

100 % is impossible: `basedpyright --verifytypes` cannot read the types of MLX's `nn`.
"""

import json
import os
import subprocess
import sys

LEAST = 0.95
OPTIONS = ("--pythonpath", sys.executable, "--outputjson", "--ignoreexternal", "--verifytypes", "mlx_lstm")


def main():
    """Print missing annotations and the share of typed names. Return the exit code."""
    # An editable install has a folder `mlx_lstm` with shaders only. PYTHONPATH makes sure that the package comes first.
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
