"""The choice of engine, as a table: every machine tests every machine's choice."""

import mlx.core as mx
import pytest

from mlx_lstm import lstm
from mlx_lstm.engines import ENGINES, choose

TABLE = [
    # device, traced, requested, engine or the reason of the refusal
    ("cpu", False, None, "numpy"),
    ("cpu", False, "numpy", "numpy"),
    ("cpu", False, "ops", "ops"),
    ("cpu", True, None, "ops"),
    ("cpu", True, "ops", "ops"),
    ("cpu", True, "numpy", "cannot run: inside mx.compile, mx.vmap or an export"),
    ("gpu", False, None, "ops"),
    ("gpu", True, None, "ops"),
    ("gpu", False, "ops", "ops"),
    ("gpu", False, "numpy", "cannot run: the numpy engine runs on the CPU and the stream's device is gpu"),
    ("cpu", False, "metal", "engine must be one of numpy, ops but got 'metal'"),
]


@pytest.mark.parametrize("device, traced, requested, expected", TABLE)
def test_choice(device, traced, requested, expected):
    if expected in ENGINES:
        choice = choose(device=device, traced=traced, requested=requested)
        assert choice.engine == expected and choice.reason
    else:
        with pytest.raises(ValueError, match=expected):
            choose(device=device, traced=traced, requested=requested)


def test_a_stream_argument_is_where_it_runs():
    """As for any MLX op; and the default device decides without one."""
    arrays = [mx.zeros(shape) for shape in ((2, 1, 1), (4, 1), (4, 1))]
    for stream in (None, mx.cpu, mx.new_stream(mx.cpu)):
        assert lstm(*arrays, stream=stream).h.shape == (2, 1, 1)
