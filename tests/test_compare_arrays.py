"""Tests of `python -m mlx_lstm.compare --arrays`, which checks a dump (arrays recorded by another program) and
explains its differences. The dumps here are correct, or wrong in a known way."""

import json
import re

import mlx.core as mx
import numpy as np
import pytest

from mlx_lstm.compare import __main__ as command
from mlx_lstm.compare.forms import preactivations, predicted, side_by_side
from mlx_lstm.lab.mpsgraph import judge
from mlx_lstm.lab.mpsgraph.cases import draw
from mlx_lstm.oracle.arithmetic import Rounding

LSTM = {"absent": ("mask", "peephole")}


def dumped(op="lstm", seed=0, readings=(), **options):
    """Return inputs and results of an op under Apple's array names, as an app would record them. The results follow
    Apple's documentation; `readings` selects other interpretations of unclear parts."""
    case = draw(np.random.default_rng(seed), op, (2, 3, 5, 6), **(LSTM | options))
    results = judge.expected(case, **dict(readings))
    everything = case.arrays | {name: value.astype(np.float32) for name, value in results.items()}
    return {re.sub("_(.)", lambda letter: letter[1].upper(), name): value for name, value in everything.items()}


def told(tmp_path, capsys, arrays, *options, op="lstm"):
    """Write the arrays to a file and run `mlx_lstm.compare --arrays` on it. Return (exit code, printed text)."""
    np.savez(tmp_path / "dump.npz", **arrays)
    try:
        arguments = ["--arrays", str(tmp_path / "dump.npz"), "--op", op, "--contenders", "ops", *options]
        code = command.main(arguments)
    except SystemExit as end:
        code = end.code
    written = capsys.readouterr()
    return code, written.out + written.err


def turned(arrays, index, *names):
    """Return a copy of `arrays`. In the arrays called `names`, the blocks of the gates are put in the order `index`."""
    axes = {name: -1 if name == "zState" else 0 for name in names}
    blocks = {name: np.split(arrays[name], len(index), axis) for name, axis in axes.items()}
    return arrays | {name: np.concatenate([blocks[name][k] for k in index], axes[name]) for name in names}


def without(arrays, *words):
    return {name: value for name, value in arrays.items() if not any(word in name for word in words)}


BACK = ("Gradient", "dsource", "drecurrent", "dinput", "dbias", "dinit", "dpeephole")
WEIGHTS = ("recurrentWeight", "inputWeight", "bias")


def test_a_right_dump(tmp_path, capsys):
    code, text = told(tmp_path, capsys, dumped())
    assert code == 0 and text.startswith("1 case, 27 comparisons: all agree\n")


@pytest.mark.parametrize("form", ["folder", "safetensors"])
def test_other_files(tmp_path, form):
    """The command reads arrays from a folder of .npy files and from a safetensors file. In this test h is the only
    result, and there are no gradients."""
    arrays = without(dumped(), *BACK, "zState")
    del arrays["c"]
    if form == "folder":
        for name, value in arrays.items():
            np.save(tmp_path / f"{name}.npy", value)
        (tmp_path / "notes.txt").write_text("not an array")
        path = tmp_path
    else:
        path = tmp_path / "dump.safetensors"
        mx.save_safetensors(str(path), {name: mx.array(value) for name, value in arrays.items()})
    assert command.main(["--arrays", str(path), "--op", "lstm", "--contenders", "numpy"]) == 0


OTHERWISE = {
    "gates": lambda a: (turned(a, (0, 3, 1, 2), *WEIGHTS), "the gates of all weights are in the order [i, o, f, z]"),
    "one bias": lambda a: (turned(a, (0, 2, 1, 3), "bias"), "the gates of bias alone are in the order [i, z, f, o]"),
    "zState's gates": lambda a: (turned(a, (0, 3, 1, 2), "zState"), "if z_state is in the order [i, o, f, z]"),
    "transposed": lambda a: (
        a | {"recurrentWeight": a["recurrentWeight"].T, "drecurrentWeight": a["drecurrentWeight"].T},
        "if recurrent_weight is [H', 4H] and drecurrent_weight is [H', 4H]",
    ),
    "a transposed result": lambda a: (a | {"dinputWeight": a["dinputWeight"].T}, "if dinput_weight is [I, 4H]"),
    "interleaved": lambda a: (
        a | {"bias": a["bias"].reshape(4, 6).T.ravel(), "dbias": a["dbias"].reshape(4, 6).T.ravel()},
        "if bias is [H x 4] and dbias is [H x 4]",
    ),
    "the last step": lambda a: (a | {"h": a["h"][-1]}, "if h is the last step alone"),
    "h and c": lambda a: (a | {"h": a["c"], "c": a["h"]}, "if h is c, so h and c are exchanged and c is h, so h and c"),
    "g(c)": lambda a: (a | {"c": np.tanh(a["c"])}, "if c is after the last activation"),
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_what_fits_is_named(tmp_path, capsys, name):
    arrays, words = OTHERWISE[name](dumped())
    code, text = told(tmp_path, capsys, arrays)
    assert code == 1 and text.splitlines()[1].startswith("fits: all 9 results agree") and words in text


def exchanged(array, axis):
    return np.concatenate(np.split(array, 2, axis)[::-1], axis)


def masked(shape):
    """Return the arrays of a bidirectional LSTM with a mask of this shape, and its results h and c. The mask [2, N, H]
    has a half for each direction."""
    absent = ("peephole", "init_state", "init_cell")
    case = draw(np.random.default_rng(0), "lstm", (2, 3, 5, 6), absent=absent, mask_shape=shape, bidirectional=True)
    results = judge.expected(side_by_side(case) if shape == (2, "N", "H") else case)
    arrays = {name: value.astype(np.float32) for name, value in (case.arrays | results).items()}
    return {name: arrays[name] for name in ("source", "recurrent_weight", "input_weight", "bias", "mask", "h", "c")}


def test_a_mask_of_two_directions(tmp_path, capsys):
    """Float64 cannot compare with this mask as it is; only its other reading can be compared."""
    code, text = told(tmp_path, capsys, masked((2, "N", "H")), "--descriptor", '{"bidirectional": true}')
    assert code == 1 and "fits: all 2 results agree" in text and "if the mask is [2, N, H] (E:mask)" in text
    assert "yours failed in 1 case; first in your arrays:\n  not compared, as float64 cannot run" in text


def test_the_reverse_direction_first_in_arguments_and_results(tmp_path, capsys):
    arrays = masked(("N", "DH"))
    for name, axis in {"recurrent_weight": 0, "input_weight": 0, "bias": 0, "mask": 1, "h": 2, "c": 2}.items():
        arrays[name] = exchanged(arrays[name], axis)
    code, text = told(tmp_path, capsys, arrays, "--descriptor", '{"bidirectional": true}')
    assert code == 1 and text.splitlines()[1].startswith("fits: all 2 results agree")
    assert (
        "if the reverse direction of all arguments comes first" in text and "are in the order reverse, forward" in text
    )


def test_batch_first_by_h_alone(tmp_path, capsys):
    arrays = without(dumped(absent=("mask", "peephole", "init_state", "init_cell")), *BACK, "zState")
    del arrays["c"]
    arrays |= {"source": arrays["source"].swapaxes(0, 1), "h": arrays["h"].swapaxes(0, 1)}
    code, text = told(tmp_path, capsys, arrays)
    assert code == 1 and "fits: the result agrees" in text and "source is [N, T, I] and h is [N, T, H]" in text


def test_open_readings(tmp_path, capsys):
    case = draw(np.random.default_rng(0), "lstm", (2, 3, 5, 6), **LSTM)
    arrays = dumped() | {"zState": preactivations(case, Rounding(np.float64)).astype(np.float32)}
    assert "if z_state is before the activations" in told(tmp_path, capsys, arrays)[1]
    both = '{"bidirectional": true}'
    arrays = dumped(bidirectional=True, absent=("mask",), readings={"output_peephole": "current"}.items())
    arrays = without(arrays, *BACK, "zState")  # without the forms of z_state the search is faster
    assert "if the output gate peeps at c[t] (E:peephole)" in told(tmp_path, capsys, arrays, "--descriptor", both)[1]


def test_both_directions_without_their_property(tmp_path, capsys):
    """The shapes of the arrays tell that the op ran in both directions, if the descriptor does not."""
    code, text = told(tmp_path, capsys, dumped(bidirectional=True, absent=("mask",)))
    assert code == 0 and text.startswith("1 case, 30 comparisons: all agree\n")


def test_a_hard_sigmoid_of_another_slope(tmp_path, capsys):
    """It is tried where the descriptor has a hard_sigmoid, and only there: see the next tests."""
    gates = {"forget_gate_activation": "hard_sigmoid"}
    arrays = dumped(readings={"hard_sigmoid": "x/6"}.items(), **gates)
    descriptor = ("--descriptor", json.dumps(gates))
    code, text = told(tmp_path, capsys, arrays, *descriptor)
    assert code == 1 and re.search(r"fits: all 9 results agree \(.*\) if hard_sigmoid has the slope 1/6", text)
    assert told(tmp_path, capsys, dumped(**gates), *descriptor)[0] == 0


def test_gru_of_another_flavour(tmp_path, capsys):
    arrays = dumped("gru", reset_after=True, flip_z=True)
    code, text = told(tmp_path, capsys, arrays, "--descriptor", '{"resetAfter": true}', op="gru")
    assert code == 1 and "fits: all 8 results agree" in text and "if the descriptor has flip_z = True" in text


def test_the_recurrent_product_of_a_candidate_includes_its_bias():
    """The form "z_state product" of a GRU is what the reset gate multiplies: with it the gates give the states again,
    h = z h + (1 - z) tanh(x + r product)."""
    case = draw(np.random.default_rng(0), "gru", (4, 3, 5, 6), reset_after=True)
    found, H = predicted(case, Rounding(np.float64), {}), case.hidden
    given = {name: np.asarray(array, np.float64) for name, array in case.arrays.items()}
    z, r, product = np.split(found["z_state product"], 3, axis=-1)
    of_input = given["source"] @ given["input_weight"][2 * H :].T + given["bias"][2 * H :]
    before = np.concatenate([given["init_state"][None], found["h"][:-1]])
    np.testing.assert_allclose(found["h"], z * before + (1 - z) * np.tanh(of_input + r * product), rtol=1e-12)


@pytest.mark.parametrize("word", ["outputFwd", "output"])
def test_other_words_for_h(tmp_path, capsys, word):
    arrays = dumped()
    arrays[word] = arrays.pop("h")
    assert told(tmp_path, capsys, arrays)[0] == 0


@pytest.mark.parametrize("size", [(2, 3, 5, 6), (5, 3, 4, 6), (20, 4, 8, 16)])
def test_float16_errors_of_one_percent_are_found(tmp_path, capsys, monkeypatch, size):
    """An error of 1 % in the largest element of a float16 array h is reported. Each element has its own error bound,
    which is narrower than a bound for the whole array. No explanation of the error is searched for, which would take
    seconds."""
    monkeypatch.setattr(command, "search", lambda dumps: (None, False))
    case = draw(np.random.default_rng(0), "lstm", size, weights=0.7 / size[3] ** 0.5, dtype=np.float16, **LSTM)
    h = judge.expected(case)["h"]
    arrays = {name: array for name, array in case.arrays.items() if not name.endswith("gradient")}
    assert told(tmp_path, capsys, arrays | {"h": h.astype(np.float16)})[0] == 0
    h[np.unravel_index(np.argmax(np.abs(h)), h.shape)] *= 1.01
    assert told(tmp_path, capsys, arrays | {"h": h.astype(np.float16)})[0] == 1


def test_what_nothing_explains_is_left(tmp_path, capsys):
    arrays = dumped()
    code, text = told(tmp_path, capsys, arrays | {"dbias": arrays["dbias"] + 1})
    assert code == 1 and "nearest: 8 of 9 results agree if everything is as documented; left: dbias" in text
    assert "hard_sigmoid" not in text


@pytest.mark.parametrize(
    "change, options, words",
    [
        (
            lambda a: a | {"recurentWeight": a.pop("recurrentWeight")},
            (),
            "did you mean recurrent_weight (recurrentWeight), drecurrent_weight",
        ),
        (lambda a: a | {"outputs": a.pop("h")}, (), "did you mean output for h"),
        (
            lambda a: a | {"inputWeight": a["inputWeight"][:, :-1]},
            (),
            "input_weight (inputWeight) must have layout [4H, I]",
        ),
        (
            lambda a: a | {"recurrentWeight": a["recurrentWeight"][:, :-1]},
            (),
            "must have layout [4H, H], but got [24, 5]",
        ),
        (lambda a: a | {"secondaryBias": a["bias"][:6]}, (), "lstm has no array 'secondaryBias'"),
        (lambda a: without(a, "source"), (), "source is missing"),
        (lambda a: without(a, "sourceGradient"), (), "needs source_gradient (sourceGradient)"),
        (lambda a: without(a, *BACK, "h", "c", "zState") | {"source": a["source"]}, (), "is missing"),
        (lambda a: a | {"bias": a["bias"][:-1]}, (), "bias must have layout [4H] = [24], but got [23]"),
        (
            lambda a: a | {"bias": a["bias"].astype(np.float16)},
            (),
            "bias must be float32, as source is, but got float16",
        ),
        (lambda a: a | {"source": a["source"].astype(float)}, (), "source must be float32 or float16 but got float64;"),
        (lambda a: a | {"z_state": a["zState"]}, (), "is there twice"),
        (dict, ("--descriptor", '{"forgetGateLst": true}'), "did you mean forget_gate_last (forgetGateLast)"),
        (dict, ("--descriptor", "[1]"), "must be a JSON object"),
        (dict, ("--descriptor", '{"reverse": 1}'), "must be True or False but got 1; see"),
        (dict, ("--cases", "x"), "--cases does not go with --arrays"),
    ],
)
def test_what_is_refused(tmp_path, capsys, change, options, words):
    code, text = told(tmp_path, capsys, change(dumped()), *options)
    assert code == 2 and words in text and text.count("\n") == 1


def test_a_gru_is_told_of_three_gates(tmp_path, capsys):
    arrays = dumped("gru", reset_after=True)
    arrays["recurrentWeight"] = arrays["recurrentWeight"][:, :-1]
    text = told(tmp_path, capsys, arrays, op="gru")[1]
    assert "must have layout [3H, H]" in text and "4H" not in text


def test_what_is_no_dump(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    for path, words in {
        str(tmp_path / "empty"): "holds no arrays",
        str(tmp_path / "no.npz"): "must be a folder",
    }.items():
        with pytest.raises(SystemExit):
            command.main(["--arrays", path, "--op", "lstm"])
        assert words in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command.main(["--arrays", "x"])
    assert "--arrays and --op go together" in capsys.readouterr().err
