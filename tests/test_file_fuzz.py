"""Run `python -m mlx_lstm.convert` on randomly damaged (mutated) files of all formats. For a file that it refuses,
the command must print one line of error. It must stay within limits of memory and time.

`test_file_fuzz.py KIND FOLDER FIRST LAST` runs this file as the child process, which converts many mutated files one
after the other. For speed, the child reads HDF5 in its own process. A file at which HDF5 hangs or crashes is later
converted by the complete command.
"""

import contextlib
import io
import os
import queue
import resource
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest

KINDS = (".safetensors", ".npz", ".keras", ".h5", ".weights.h5", ".onnx")
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
    data, rng = path.read_bytes(), np.random.default_rng([n, KINDS.index("".join(path.suffixes))])
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


def convert_all(kind, folder, first, last):
    """Convert the mutated files `first` to `last` - 1 one after the other; the child process runs this function.
    Print each file's number before its conversion, and the exit code and a list of errors after it."""
    import json

    import h5py  # noqa: F401 (here, so that the memory of the import is not measured)
    import onnx  # noqa: F401

    from mlx_lstm.convert import _hdf5, _hdf5_child
    from mlx_lstm.convert.__main__ import main

    def here(command, input, **_):
        most, *path = command[4:]
        line, arrays = _hdf5_child.answer(path[0] if path else io.BytesIO(input), int(most))
        output = json.dumps(line).encode() + b"\n" + b"".join(array.tobytes() for array in arrays)
        return subprocess.CompletedProcess(command, 0, output, b"")

    flags = len(_hdf5.child_command("")) - 3
    _hdf5.subprocess.run = lambda command, **options: here(command[flags:], **options)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    seed, path, target = folder / f"seed{kind}", folder / f"mutant{kind}", folder / "out.safetensors"
    with contextlib.redirect_stdout(io.StringIO()):
        assert main([str(seed), str(target), "--force"]) == 0
    usual = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for n in range(first, last):
        print(n, flush=True)
        path.write_bytes(mutant(seed, n))
        out, err = io.StringIO(), io.StringIO()
        wrong = []
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = main([str(path), str(target), "--force"])
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
        if names := {each.name for each in folder.iterdir()} - {seed.name, path.name, target.name}:
            wrong.append(f"left {names}")
        print(f"{code} {'; '.join(wrong).encode('ascii', 'replace').decode()}", flush=True)
    print("end", flush=True)


def fuzz(kind, folder, count):
    """Convert `count` mutated files of one kind in child processes. Return (number of files for each exit code,
    [(file number, error)], [file numbers at which HDF5 hung or crashed])."""
    counts, wrong, lost, first = {"0": 0, "2": 0}, [], [], 0
    while first < count:
        command = [sys.executable, __file__, kind, str(folder), str(first), str(count)]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
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
                    wrong.append((at, text))
        process.kill()
        process.wait()
        if said:
            break
        lost.append(at)
        first = at + 1
    for n in lost:
        path = folder / f"mutant{kind}"
        path.write_bytes(mutant(folder / f"seed{kind}", n))
        command = [sys.executable, "-m", "mlx_lstm.convert", str(path), str(folder / "out.safetensors"), "--force"]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=2 * SECONDS)
        refused = done.returncode == 2 and not done.stdout and done.stderr.count("\n") == 1
        # A child process did not finish this mutated file in time or crashed. So the whole conversion command runs here
        # once more. If it ends with exit code 0, HDF5 did not hang: the machine was only busy.
        if not refused and done.returncode != 0:
            wrong.append((n, f"whole command: {done.returncode} {done.stderr[-300:]}"))
    return counts, wrong, lost


def check(kind, folder, count):
    from mlx_lstm import convert

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
    convert.write(folder / f"seed{kind}", layers)
    counts, wrong, lost = fuzz(kind, folder, count)
    print(f"{kind}: {count} mutated files, accepted and refused: {counts}, HDF5 hung or crashed at {lost}")
    assert not wrong, wrong[:20]
    assert sum(counts.values()) + len(lost) == count


@pytest.mark.parametrize("kind", KINDS)
def test_mutated_files(kind, tmp_path):
    check(kind, tmp_path, 50)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_many_mutated_files(kind, tmp_path):
    check(kind, tmp_path, 2000)


if __name__ == "__main__":
    convert_all(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
