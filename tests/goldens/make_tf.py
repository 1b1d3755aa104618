"""Record what TensorFlow's block ops return, in tf_*.npz, for machines without TensorFlow. Run
`python tests/goldens/make_tf.py`.

There is one file per op. "0/in/x" is argument x of case 0, "0/out/h" its output h, "cases" the number of cases,
"tensorflow" the version. Values at time steps t >= seq_len_max are NaN in the arguments. In the outputs of forward ops
these values are 0, because TensorFlow does not write them.
"""

import sys
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent
sys.path[:0] = [str(FOLDER.parents[1]), str(FOLDER.parent)]

from tf_cases import GRADIENT, OPS, SEQUENCE_OPS, draw, draw_gradients, gradient_case, theirs  # noqa: E402

SEEDS = {np.float32: range(5), np.float16: range(10, 12)}


def main():
    import tensorflow

    for op in OPS:
        files = {name: {"tensorflow": np.array(tensorflow.__version__)} for name in (op, GRADIENT[op])}
        dtypes = [np.float32] if op == "gru_block_cell" else list(SEEDS)
        pairs = [(dtype, seed) for dtype in dtypes for seed in SEEDS[dtype]]
        for n, (dtype, seed) in enumerate(pairs):
            case = draw(op, seed, dtype, (4, 1 + n % 3, 1 + n % 4, 1 + n % 5))
            outputs = theirs(op, case)
            for value in outputs.values() if op in SEQUENCE_OPS else ():
                value[case["seq_len_max"] :] = 0
            given = gradient_case(op, case, outputs, draw_gradients(op, case, seed))
            for name, arguments, results in ((op, case, outputs), (GRADIENT[op], given, theirs(GRADIENT[op], given))):
                files[name] |= {f"{n}/in/{key}": np.asarray(value) for key, value in arguments.items()}
                files[name] |= {f"{n}/out/{key}": value for key, value in results.items()}
        for name, contents in files.items():
            np.savez_compressed(FOLDER / f"tf_{name}.npz", cases=np.array(len(pairs)), **contents)


if __name__ == "__main__":
    main()
