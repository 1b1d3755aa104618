"""Tests of `examples/from_tensorflow.py`, run with small sizes as a user would run it."""

import os
import re
import subprocess
import sys
from pathlib import Path

from cases import needs

ROOT = Path(__file__).parents[1]
SMALL = {"steps": 31, "batch": 8, "window": 12, "embedding": 8, "hidden": 16, "learning-rate": 0.003}


def test_same_outputs_then_a_falling_loss_then_back():
    """The example's outputs agree with Keras, its loss falls during training, and the weights convert back to Keras.
    It runs in its own process: Keras has one backend per process, and the other tests use Keras with jax."""
    needs("tensorflow", "keras")
    options = [f"--{name}={value}" for name, value in SMALL.items()]
    command = [sys.executable, str(ROOT / "examples" / "from_tensorflow.py"), *options]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    differences = re.findall(r"largest difference (\S+), of numbers up to (\S+)", run.stdout)
    assert len(differences) == 2
    for difference, largest in differences:
        assert float(difference) <= 2e-6 + 1e-5 * float(largest)
    at_keras, *in_mlx, back, last = (float(number) for number in re.findall(r": (\d\.\d{4})", run.stdout))
    assert len(in_mlx) == 4 and at_keras > in_mlx[0] > in_mlx[1] > in_mlx[2]
    assert abs(back - last) <= 1e-4 and last == in_mlx[3]  # the loss after the last training step
