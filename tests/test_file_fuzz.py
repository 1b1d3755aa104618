"""Read randomly damaged (mutated) files of all formats, and files in which one field lies (`lies.py`). For a file that
it refuses, `python -m mlx_lstm.convert` must print one line of error. It must stay within limits of memory and time.

`test_file_fuzz.py KINDS FOLDER FIRST COUNT` runs this file as the child process, which reads COUNT such files of each
kind one after the other: the damaged ones have even numbers, the lies odd ones. FIRST is where it begins. For speed,
the child reads HDF5 in its own process. A file at which HDF5 hangs or crashes is later converted by the complete
command.
"""

import contextlib
import io
import json
import os
import queue
import resource
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import lies
import numpy as np
import pytest

KINDS = tuple(lies.OF)
ROOT = Path(__file__).parents[1]
SECONDS = 20
MEMORY = 2**30
NUMBERS = (0, 1, 0x7F, 0x80, 0xFF, 2**15, 2**16 - 1, 2**31 - 1, 2**32 - 1, 2**40, 2**63 - 1, 2**64 - 1)


def mutated(data, rng):
    """Return a copy of the bytes `data` with one to four random changes. An attacker or a damaged disk could make such
    changes."""
    data = bytearray(data)
    for _ in range(int(rng.integers(1, 5))):
        place, end = (int(n) for n in sorted(rng.integers(0, max(1, len(data)), 2)))
        end = min(end, place + int(rng.integers(1, 64)))
        match int(rng.integers(0, 8)):
            case 0 | 1:
                data[place : place + 1] = bytes([int(rng.integers(0, 256))])
            case 2 | 3:
                width = int(rng.choice([1, 2, 4, 8]))
                number = NUMBERS[int(rng.integers(0, len(NUMBERS)))] % 256**width
                data[place : place + width] = number.to_bytes(width, str(rng.choice(["little", "big"])))
            case 4:
                del data[place:end]
            case 5:
                data[place:place] = data[place:end]
            case 6:
                data[place:end] = bytes(rng.integers(0, 256, end - place, np.uint8))
            case 7:
                digits = [n for n in range(len(data)) if 48 <= data[n] < 58][:5000]
                if digits:
                    place = int(rng.choice(digits))
                    data[place : place + 1] = str(rng.choice(["-1", "0", "9" * 20, "1e999", "NaN", "[", '"'])).encode()
    return bytes(data)


def mutant(path, n):
    """Return the bytes of the n-th mutated version of the file `path`. For a zip file, often the content of one
    member is mutated and packed again, so that all checksums stay right."""
    kind = "".join(path.suffixes)
    data, rng = path.read_bytes(), np.random.default_rng([n, KINDS.index(kind)])
    if n % 2:
        return lies.OF[kind](data, rng)
    if path.suffix not in (".npz", ".keras") or rng.random() < 0.4:
        return mutated(data, rng)
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as archive, zipfile.ZipFile(out, "w") as changed:
        names = archive.namelist()
        which = names[int(rng.integers(0, len(names)))]
        for name in names:
            content = archive.read(name)
            changed.writestr(name, mutated(content, rng) if name == which else content)
    return out.getvalue()


def command(kind, path, target):
    """Read a file by the command for its kind. Return the exit code."""
    from mlx_lstm.convert.__main__ import main
    from mlx_lstm.ground.files import foreign
    from mlx_lstm.lab.mpsgraph.dump import arrays_of
    from mlx_lstm.lab.mpsgraph.files import load_golden

    if kind not in (".npy", ".golden.npz"):
        return main([str(path), str(target), "--force"])
    try:
        if kind == ".npy":
            with foreign(path) as file:
                arrays_of(file, alone=False)
        else:
            load_golden(str(path))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def hdf5_in_this_process():
    """Let this process read HDF5 by itself, without a child process, which would take most of the time."""
    from mlx_lstm.convert import _hdf5, _hdf5_child
    from mlx_lstm.ground.budget import Budget

    def here(command, input=None, stdin=None, **_):
        budget, limits = Budget(int(command[-3]), int(command[-2])), resource.getrlimit(resource.RLIMIT_DATA)
        _hdf5_child.limit_memory(budget)
        line, arrays = _hdf5_child.answer(stdin or io.BytesIO(input), budget)
        resource.setrlimit(resource.RLIMIT_DATA, limits)
        output = json.dumps(line).encode() + b"\n" + b"".join(array.tobytes() for array in arrays)
        return subprocess.CompletedProcess(command, 0, output, b"")

    _hdf5.subprocess.run = here


def convert_all(kinds, folder, first, count):
    """Convert `count` mutated files of each kind, from place `first` in this sequence on; the child process runs this
    function. Print each file's place before its conversion, and the exit code and a list of errors after it."""
    import h5py  # noqa: F401 (here, so that the memory of the import is not measured)
    import onnx  # noqa: F401

    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    hdf5_in_this_process()
    for place in range(first, count * len(kinds)):
        kind, n = kinds[place // count], place % count
        own = folder / kind
        seed, path, target = own / f"seed{kind}", own / f"mutant{kind}", own / "out.safetensors"
        if place == first or n == 0:
            with contextlib.redirect_stdout(io.StringIO()):
                assert command(kind, seed, target) == 0
            usual = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(place, flush=True)
        path.write_bytes(mutant(seed, n))
        out, err = io.StringIO(), io.StringIO()
        wrong = []
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = command(kind, path, target)
            except BaseException as error:
                code = f"{type(error).__name__}: {str(error)[:200]}"
        if code not in (0, 2):
            wrong.append(str(code))
        if code == 2 and (out.getvalue() or err.getvalue().count("\n") != 1):
            wrong.append(f"it said {err.getvalue()[:300]!r}")
        if not (out.getvalue() + err.getvalue()).replace("\n", "").isprintable():
            wrong.append("unprintable")
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - usual
        if grown * 1024 > 10 * path.stat().st_size + 200 * 2**20:
            wrong.append(f"{grown // 1024} MB")
        if names := {each.name for each in own.iterdir()} - {seed.name, path.name, target.name}:
            wrong.append(f"left {names}")
        print(f"{code} {'; '.join(wrong).encode('ascii', 'replace').decode()}", flush=True)
    print("end", flush=True)


def fuzz(kinds, folder, count):
    """Convert `count` mutated files of each kind in a child process, and in another one after each file that ends it.
    Return (number of files for each exit code, [(kind, number of the file, error)], [(kind, number of a file at which
    HDF5 hung or crashed)])."""
    counts, wrong, lost, first = {"0": 0, "2": 0}, [], [], 0
    while first < count * len(kinds):
        command = [sys.executable, __file__, ",".join(kinds), str(folder), str(first), str(count)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen(command, **pipes, text=True, env=environment)
        lines = queue.Queue()
        threading.Thread(target=lambda p=process, q=lines: [*map(q.put, p.stdout), q.put("")], daemon=True).start()
        at, said = first, ""
        while True:
            try:
                said = lines.get(timeout=3 * SECONDS if at == first else SECONDS)
            except queue.Empty:
                said = ""
            if not said or said == "end\n":
                break
            if said.strip().isdecimal() and " " not in said:
                at = int(said)
            else:
                code, _, text = said.strip().partition(" ")
                counts[code] = counts.get(code, 0) + 1
                if text:
                    wrong.append((kinds[at // count], at % count, text))
        process.kill()
        process.wait()
        if said:
            break
        lost.append((kinds[at // count], at % count))
        first = at + 1
    for kind, n in lost:
        path = folder / kind / f"mutant{kind}"
        path.write_bytes(mutant(folder / kind / f"seed{kind}", n))
        code = "import sys, test_file_fuzz as f; sys.exit(f.command(sys.argv[1], *map(f.Path, sys.argv[2:])))"
        command = [sys.executable, "-c", code, kind, str(path), str(folder / kind / "out.safetensors")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=2 * SECONDS)
        refused = done.returncode == 2 and not done.stdout and done.stderr.count("\n") == 1
        # A child process did not finish this mutated file in time or crashed. So the whole conversion command runs here
        # once more. If it ends with exit code 0, HDF5 did not hang: the machine was only busy.
        if not refused and done.returncode != 0:
            wrong.append((kind, n, f"whole command: {done.returncode} {done.stderr[-300:]}"))
    return counts, wrong, lost


def write_seed(kind, folder):
    """Write a right file of a kind, from which the mutated ones are made, into a folder of its own."""
    from mlx_lstm import convert
    from mlx_lstm.lab.mpsgraph import judge
    from mlx_lstm.lab.mpsgraph.cases import grid
    from mlx_lstm.lab.mpsgraph.files import Golden, save_golden

    rng = np.random.default_rng(0)
    layers = {}
    for name, G in {"lstm": 4, "gru": 3}.items():
        shapes = {
            "weight_ih_l0": (G * 4, 3),
            "weight_hh_l0": (G * 4, 4),
            "bias_ih_l0": (G * 4,),
            "bias_hh_l0": (G * 4,),
        }
        arrays = {key: rng.normal(size=shape).astype("f") for key, shape in shapes.items()}
        layers[name] = convert.from_torch(arrays)
    (folder / kind).mkdir()
    seed = folder / kind / f"seed{kind}"
    if kind == ".npy":
        np.save(seed, rng.normal(size=(4, 3)).astype("f"))
    elif kind == ".golden.npz":
        case = next(iter(grid(lambda case: True)))
        results = {name: value.astype(np.float32) for name, value in judge.expected(case).items()}
        save_golden(str(seed), Golden({"chip": "x"}, "oracle", [case], {case.name: results}))
    else:
        convert.write(seed, layers)


def check(kinds, folder, count):
    for kind in kinds:
        write_seed(kind, folder)
    counts, wrong, lost = fuzz(kinds, folder, count)
    print(f"{kinds}: {count} mutated files each, accepted and refused: {counts}, HDF5 hung or crashed at {lost}")
    assert not wrong, wrong[:20]
    assert sum(counts.values()) + len(lost) == count * len(kinds)


def test_mutated_files(tmp_path):
    check(KINDS, tmp_path, 25)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_many_mutated_files(kind, tmp_path):
    check([kind], tmp_path, 400)


if __name__ == "__main__":
    convert_all(sys.argv[1].split(","), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
