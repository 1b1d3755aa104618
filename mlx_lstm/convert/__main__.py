"""`python -m mlx_lstm.convert SRC DST`: convert the recurrent layers of a file into a file of any other kind. SRC is
the file to read, DST the file to write.

In this module `Model` is the contents of a file, and `options` has the options of the command line as attributes.
`title(name)`, `some(names)` and `shown(text, LINE)` make texts from a foreign file safe and short enough to print.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import mlx.core as mx

from ..ground.budget import shown
from ..ground.checks import fail
from ..ground.machine import VERSION, run_command
from ._files import Model, check_folder, ending_of, read, replace, some, title, write, write_to
from ._keys import STYLES, WAYS
from .keras import stack as stack_of_keras
from .weights import bits, describe, differences, stacked

LOSSES = {"bx": "two biases are one now, their sum, and cannot be separated again", "bh": ""}
"""The line to print if a bias differs between the old and the new file, by the name of the bias. These differences are
expected: a format with one bias stores the sum of both. An empty text is not printed."""

LINE = 1000
"""The largest number of characters in a printed line. A foreign file may have names of any length."""


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit code. argv: the arguments, or None for sys.argv."""
    options = make_parser().parse_args(argv)
    try:
        with mx.stream(mx.cpu):  # only the CPU has float64
            lines = convert(options)
    except (ValueError, OSError, ImportError) as error:
        print(f"not converted: {shown(error, LINE)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\nnot converted: interrupted; {shown(options.target)} is as before", file=sys.stderr)
        return 130
    except MemoryError:
        print(f"not converted: {shown(options.source)} needs more memory than there is", file=sys.stderr)
        return 2
    print("\n".join(shown(line, LINE) for line in lines))
    return 0


def convert(options: argparse.Namespace) -> list[str]:
    """Convert the file options.source to options.target and return the lines to print. The new file is read back before
    it gets its final name. The last lines say how the layers in the new file differ from the layers of the source."""
    source, target = options.source, options.target
    is_package = target.suffix == ".mlpackage"
    ending = target.suffix if is_package else ending_of(target, writes=True)  # raises ValueError for an unknown ending
    if target.exists() and not options.force:
        raise FileExistsError(f"{target} exists; --force replaces it")
    if target.is_dir() and not is_package:
        raise IsADirectoryError(f"{target} is a folder")
    check_folder(target)
    # In these formats the user may choose the keys of the arrays; the other formats prescribe them.
    has_keys = ending in (".safetensors", ".npz")
    for option in ("keys", "to"):
        if not has_keys and (value := getattr(options, option)):
            fail("convert", f"--{option} must be left out for {target.name}, which has keys of its own,", repr(value))
    if options.external_data and source.suffix != ".onnx":
        fail("convert", "--external-data must be left out for a file that is no .onnx", source.name)
    if options.ways and not (options.keys or options.from_keys):
        fail("convert", "--ways must be left out without --keys or --from-keys, which have {way},", repr(options.ways))
    model, ways, style = model_of(options), tuple(options.ways or WAYS), options.to or "torch"

    if is_package:
        write(target, model, force=options.force)
        return [f"{source} -> {target}", *source_lines(model), "  not read again: Core ML packages are only written"]

    # Write the new file to the temporary path `partial` and read it again. Return what was read, and the lines about
    # differences. Without --keys the style prescribes the words for directions, so `ways` is passed only with --keys.
    def write_and_read(partial: Path) -> tuple[Model, list[str]]:
        write_to(partial, model, style, options.keys, options.ways if options.keys else None)
        again = read(partial, keys=options.keys if has_keys else None, ways=ways)
        # A layer's name may look like a number or a direction in a key, so that `read` would find other layers.
        numbers = [sum(len(weights.layers) for weights in each.layers.values()) for each in (model, again)]
        if numbers[0] != numbers[1]:
            raise ValueError(f"{target} would be read as {numbers[1]} layers, not {numbers[0]}: give other --keys")
        for key, array in model.rest.items() if has_keys else ():
            if key not in again.rest or bits(array) != bits(again.rest[key]):
                raise ValueError(f"{shown(key)} would not be the same in {target}")
        return again, comparison(model, again)

    again, compared = replace(target, write_and_read, options.force)
    lines = [f"{source} -> {target}" + (f", with the names of {style}" if has_keys else "")]
    lines += source_lines(model)
    lines += [f"    now {title(name)}: {some(keys, most=4)}" for name, keys in again.keys.items()]
    lines += [f"  {note}" for note in model.notes]
    if model.rest:
        done = "copied unchanged" if has_keys else f"left out, which {ending} cannot hold beside the layers"
        arrays = "other array" if len(model.rest) == 1 else "other arrays"
        lines.append(f"  {len(model.rest)} {arrays} {done}: {some(list(model.rest))}")
    matrices = [way["Wx"] for weights in again.layers.values() for layer in weights.layers for way in layer]
    if ending == ".safetensors" and any("float64" in str(array.dtype) for array in [*matrices, *again.rest.values()]):
        lines.append("  it holds float64 arrays, which mx.load reads from an .npz file, not from a .safetensors file")
    return [*lines, *compared]


def source_lines(model: Model) -> list[str]:
    """Return a line for each layer that was read: its name, its sizes and its keys."""
    layers = model.layers.items()
    return [f"  {title(name)}: {describe(weights)}; from {some(model.keys[name], most=2)}" for name, weights in layers]


def model_of(options: argparse.Namespace) -> Model:
    """Read the source file with the command's options. Return the layers and arrays that the options select."""
    source = options.source
    keywords = {"keys": options.from_keys, "ways": tuple(options.ways or WAYS), "order": options.order}
    keywords |= {"nonlinearity": options.nonlinearity, "external_data": options.external_data}
    model = read(source, only=options.only, **keywords)
    if not model.layers:
        # Arrays in these two formats may have any names, such as lstm/lstm_cell/kernel; --from-keys describes them.
        others = ["--from-keys reads other names"] if ending_of(source) in (".safetensors", ".npz") else model.notes
        arrays = some(list(model.rest)) or "none"
        raise ValueError("; ".join([f"{source} holds no LSTM, GRU or RNN layer; its arrays: {arrays}", *others]))
    # This is checked after reading, because only the layers that were read tell whether one of them is a plain RNN.
    if options.nonlinearity and all(weights.cell.op != "rnn" for weights in model.layers.values()):
        rule = f"--nonlinearity must be left out for {source.name}, which has no plain RNN,"
        fail("convert", rule, repr(options.nonlinearity))
    return chosen(model, options)


def chosen(model: Model, options: argparse.Namespace) -> Model:
    """Join and rename the layers of a model as the command's options say, and return the new model. options.stack: None
    or texts such as "lstm,lstm_1", the names of layers to join. options.prefix: None or texts "OLD=NEW", where NEW
    replaces OLD at the start of names. options.layers_only: whether to leave out arrays that belong to no layer."""
    layers, keys = dict(model.layers), dict(model.keys)
    wanted = [name for names in options.stack or [] for name in names.split(",")]
    for name in wanted:
        if name not in layers:
            raise ValueError(f"no recurrent layer is called {name!r}; there are {some(map(title, layers))}")
        if wanted.count(name) > 1:
            fail("convert", "--stack must name each layer once", f"{name!r} twice")
    # In a Keras model a layer with go_backwards passes its outputs on in the reverse order. `stack_of_keras` knows
    # this.
    is_keras = ending_of(options.source) in (".keras", ".h5", ".weights.h5")
    join = stack_of_keras if is_keras else stacked
    for names in options.stack or []:  # such as "lstm,lstm_1": lstm_1 reads the output of lstm
        first, *others = names.split(",")
        layers[first] = join("--stack", [layers[name] for name in (first, *others)])  # errors begin with "[--stack]"
        keys[first] = [key for name in (first, *others) for key in keys[name]]
        for name in others:
            del layers[name]
    rest = {} if options.layers_only else model.rest
    for old, new in (pair.split("=", 1) for pair in options.prefix or []):
        if not any(renamed(name, old, new) != name for entries in (layers, keys, rest) for name in entries):
            there = some([*map(title, layers), *rest])
            fail("convert", f"--prefix {old}={new} must rename a layer or a key", there)
        layers, keys, rest = (all_renamed(entries, old, new) for entries in (layers, keys, rest))
    return model._replace(layers=layers, rest=rest, keys=keys)


def all_renamed(entries: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    """Return a dict whose keys are renamed by `renamed`. Raise ValueError if two entries would have the same name."""
    changed = {renamed(name, old, new): entry for name, entry in entries.items()}
    if len(changed) < len(entries):
        name = Counter(renamed(name, old, new) for name in entries).most_common(1)[0][0]
        fail("convert", f"--prefix {old}={new} must leave all names different", f"{title(name)} twice")
    return changed


def renamed(name: str, old: str, new: str) -> str:
    """Return `name` with `new` in place of `old` at its start. The names of arrays contain a dot after the layer's
    name, the layer's own name does not: so `old` "encoder." also matches the name "encoder", and a dot at the end of
    the result is removed."""
    if f"{name}." == old:
        return new.rstrip(".")
    return (new + name[len(old) :]).rstrip(".") if name.startswith(old) else name


def comparison(model: Model, again: Model) -> list[str]:
    """Return a line of text for each difference, even of a single bit, between the layers of the old file (`model`) and
    the layers of the new file (`again`)."""
    # before: pairs of a stack's name and one of its layers; after: all layers of the new file. `each` returns the
    # layers of a stack as one `Weights` each.
    before = [(name, layer) for name, weights in model.layers.items() for layer in weights.each()]
    after = [layer for weights in again.layers.values() for layer in weights.each()]
    if again.layers.keys() == model.layers.keys():  # put the old layers into the order of the new file
        place = {name: n for n, name in enumerate(again.layers)}
        before.sort(key=lambda name_and_layer: place[name_and_layer[0]])
    lines = []
    for (name, old), new in zip(before, after, strict=True):
        changes = differences(old, new)  # names such as "bx" and "forget_bias", or texts such as "A is now B"
        # bx is the bias of the input's product, bh the bias of the recurrent product. If the forget bias and bx both
        # differ, the format has no forget bias and `write` added it to bx: one line reports both. If bh differs, too,
        # `write` also added bh to bx: then "bx" stays in the list, and the line in `LOSSES` reports the sum.
        if {"forget_bias", "bx"} <= set(changes):
            lines.append(f"  {title(name)}: the forget bias is a part of the bias now")
            changes = [each for each in changes if each != "forget_bias" and (each != "bx" or "bh" in changes)]
        for each in changes:
            text = each if " is now " in each else f"{each} is not the same in the new file"
            if text := LOSSES.get(each, text):  # "" for bh: the text for bx says it
                lines.append(f"  {title(name)}: {text}")
    return list(dict.fromkeys(lines)) or ["  read back: the same to the last bit"]


class Parser(argparse.ArgumentParser):
    """A parser of command-line options that reports an error in one line."""

    def error(self, message: str) -> NoReturn:
        print(f"not converted: {message}; see --help", file=sys.stderr)
        raise SystemExit(2)  # the exit code of argparse


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line's options."""
    parser = Parser(
        "python -m mlx_lstm.convert",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Read the LSTM, GRU and RNN layers of the file SRC, and write them to the file DST.\n\n"
        "The endings of the file names select the formats: .safetensors, .npz, .keras, .h5,\n"
        ".weights.h5 and .onnx. DST may also be a Core ML package, .mlpackage, for LSTMs.\n"
        "The layers keep their names. The command prints what it converted. It also reads\n"
        "DST again, unless that is a Core ML package, and compares all numbers bit for bit.",
        epilog="examples:\n"
        "  PyTorch's weights for a layer of mlx_lstm.nn:\n"
        "    python -m mlx_lstm.convert state_dict.safetensors mlx.safetensors --to mlx\n"
        "  two layers of a Keras model as one PyTorch layer with num_layers=2:\n"
        "    python -m mlx_lstm.convert model.keras torch.safetensors --stack lstm,lstm_1\n"
        "  a file with keys such as encoder.Wx_fwd:\n"
        "    python -m mlx_lstm.convert a.safetensors b.onnx --from-keys '{name}.{array}_{way}' \\\n"
        "        --ways fwd bwd\n\n"
        "The exit code is 0, or 2 if nothing was written; then a line says why.",
    )
    add = parser.add_argument
    add("source", metavar="SRC", type=Path, help="the file to read")
    add("target", metavar="DST", type=Path, help="the file to write")
    add("--force", action="store_true", help="replace DST if it exists")
    parser.add_argument("--version", action="version", version=f"mlx-lstm {VERSION}")
    add_choice(parser.add_argument_group("which layers").add_argument)
    add_names(parser.add_argument_group("names of arrays in .safetensors and .npz files").add_argument)
    add_facts(parser.add_argument_group("facts that SRC does not contain").add_argument)
    return parser


def add_choice(add: Callable[..., object]) -> None:
    """Add the options that select, join and rename layers, by the method `add_argument` of a group."""
    only = "convert only the layers with these names; the others may then be layers that cannot be read"
    add("--only", nargs="+", metavar="NAME", help=only)
    add("--layers-only", action="store_true", help="do not copy the arrays of other layers, such as an embedding")
    stack = (
        "join layers of SRC to one multi-layer network, as with num_layers=2 in PyTorch; B reads the output of A; "
        "may be repeated"
    )
    add("--stack", action="append", metavar="A,B", help=stack)
    change = (
        "replace OLD by NEW at the start of the names of layers and keys. For example, model.lstm.=lstm. shortens "
        "names, and model.= removes the start. If OLD is empty, NEW is put before all names. May be repeated"
    )
    add("--prefix", action="append", type=prefix, metavar="OLD=NEW", help=change)


def add_names(add: Callable[..., object]) -> None:
    """Add the options that say how arrays are named in a file."""
    styles = (
        "the names to give to the arrays in DST. torch (the default), as in PyTorch: weight_ih_l0; mlx, as in mlx.nn: "
        "Wx, Wh, bias; two-biases, as mlx but with both biases of PyTorch: Wx, Wh, bias_ih, bias_hh; keras: kernel; "
        "ops, as the arguments of mlx_lstm.lstm, gru and rnn: Wx, Wh, b"
    )
    add("--to", choices=STYLES, help=styles)
    keys = (
        "a pattern for the names of the arrays in DST, such as '{name}.{array}': {name} is replaced by the layer's "
        "name, {array} by the array's name, {layer} by the layer's number, {way} by the direction"
    )
    add("--keys", metavar="PATTERN", help=keys)
    from_keys = (
        "a pattern for the names of arrays in SRC, as for --keys; needed only if the command does not recognise "
        "the names"
    )
    add("--from-keys", metavar="PATTERN", help=from_keys)
    ways = "the words that stand for {way} in a pattern: A for the forward direction, B for the reverse one"
    add("--ways", nargs=2, metavar=("A", "B"), help=ways)


def add_facts(add: Callable[..., object]) -> None:
    """Add the options for facts that a weight file does not contain."""
    add("--order", help="the order of the gates, such as icfo, if it is not the usual order of the format of SRC")
    plain = "the activation function of plain RNN layers, which weight files do not contain; default: tanh"
    add("--nonlinearity", choices=("tanh", "relu", "sigmoid"), help=plain)
    outside = (
        "also read the files in which an .onnx file stores arrays; without this option such an .onnx file is refused, "
        "because it may come from a stranger"
    )
    add("--external-data", action="store_true", help=outside)


def prefix(text: str) -> str:
    """Return the value of --prefix after checking that it contains "="."""
    if "=" not in text:
        raise argparse.ArgumentTypeError(f"{text!r} is not OLD=NEW")
    return text


if __name__ == "__main__":
    run_command(main)
