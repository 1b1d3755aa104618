"""Run a case (a call of an MPSGraph op with its arrays) on a layer of torch, which may have several layers. On the
device "mps" torch itself calls MPSGraph; on the device "cpu" it does not."""

from typing import Any

import numpy as np

from .cases import GATES, Arrays, CompareCase


def hindrance(case: CompareCase) -> str | None:
    """Return the reason why torch's layer cannot run this case, or None if it can."""
    # changed: the properties that the case sets, without flags that are off. A property set to its default value also
    # counts, so torch does not run such a case.
    changed = {name for name, value in case.descriptor.items() if value is not False} - {"bidirectional"}
    if "reverse" in changed:
        return "no reverse alone"
    if case.arrays["source"].dtype != np.float32:
        return "float32 only"
    if "source_gradient" not in case.arrays:
        return "no gradient of h"  # `run` always computes gradients
    if "mask" in case.arrays or "peephole" in case.arrays:
        return "no mask, no peephole"
    if "input_weight" not in case.arrays:
        return "no projected source"
    if case.op == "gru":
        return None if changed == {"reset_gate_first", "reset_after"} else "another kind of GRU"
    if case.op == "single_gate_rnn":
        return None if case.descriptor.get("activation", "relu") in ("relu", "tanh") else "relu and tanh only"
    return "no other activations or gate orders" if changed else None


def run(case: CompareCase, device: str) -> Arrays:
    """Run a case on torch's layer. Return the results that torch can compute: h and the gradients."""
    import torch

    layer = make_layer(case).to(device)
    source = torch.tensor(case.arrays["source"], device=device, requires_grad=True)
    states = {name: state(case, name, device) for name in ("init_state", "init_cell")}
    initial = [value for name, value in states.items() if case.op == "lstm" or name == "init_state"]
    # The cases of stacks have no initial states: torch's layer then starts with zeros.
    one_layer = len(case.layers) == 1
    h, last = layer(source, *([tuple(initial) if case.op == "lstm" else initial[0]] if one_layer else []))
    ends = list(last) if case.op == "lstm" else [last]
    outputs, cotangents = [h], [torch.tensor(case.arrays["source_gradient"], device=device)]
    # strict=False: a GRU and an RNN have no cell state, so only one end.
    for name, end in zip(("state_gradient", "cell_gradient"), ends, strict=False):
        if name in case.arrays:
            outputs.append(end)
            cotangents.append(state(case, name, device).detach())  # no gradient for a cotangent
    torch.autograd.backward(outputs, cotangents)
    results = {"h": h, "dsource": source.grad}
    for n in range(len(case.layers)):
        results |= gradients_of_layer(case, layer, n)
    for name, value in states.items():
        if value.grad is not None:
            results[f"d{name}"] = torch.cat(list(value.grad), dim=-1)  # [D, N, H] becomes [N, D H]
    names = [name for name in case.results if name in results]  # in the order of the op
    return {name: results[name].detach().cpu().numpy() for name in names}


def make_layer(case: CompareCase) -> Any:
    """Return a layer of torch with the weights of a case. torch's bias_ih is the case's bias. torch's bias_hh is zero,
    except the candidate's part in a GRU, which is the case's secondary bias."""
    import torch

    layers, H, dtype = case.layers, case.hidden, case.arrays["source"].dtype
    biased = any("bias" in name for name in case.arrays)
    options = {"bidirectional": case.bidirectional, "bias": biased, "num_layers": len(layers)}
    if case.op == "single_gate_rnn":
        options["nonlinearity"] = case.descriptor.get("activation", "relu")
    kind = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU, "single_gate_rnn": torch.nn.RNN}[case.op]
    layer = kind(case.arrays["source"].shape[-1], H, **options, dtype=getattr(torch, dtype.name))
    rows = GATES[case.op] * H
    for n, arrays in enumerate(one.arrays for one in layers):
        zeros = np.zeros(rows * case.directions, dtype)
        secondary = zeros.copy().reshape(case.directions, rows)
        if "secondary_bias" in arrays:  # the candidate is the last of a GRU's three gates
            secondary[:, 2 * H :] = arrays["secondary_bias"].reshape(case.directions, H)
        values = {"weight_ih": arrays["input_weight"], "weight_hh": arrays["recurrent_weight"].reshape(-1, H)}
        values |= {"bias_ih": arrays.get("bias", zeros), "bias_hh": secondary.reshape(-1)}
        with torch.no_grad():
            for d, suffix in enumerate(("", "_reverse")[: case.directions]):
                for name, value in values.items():
                    if hasattr(layer, f"{name}_l{n}{suffix}"):
                        getattr(layer, f"{name}_l{n}{suffix}").copy_(torch.tensor(value[d * rows : (d + 1) * rows]))
    return layer


def gradients_of_layer(case: CompareCase, layer: Any, n: int) -> dict[str, Any]:
    """Return the gradients of the weights of layer n, in the layouts of MPSGraph."""
    import torch

    def parameters(name: str) -> list[Any]:
        return [getattr(layer, f"{name}_l{n}{suffix}").grad for suffix in ("", "_reverse")[: case.directions]]

    R = parameters("weight_hh")
    found = {"drecurrent_weight": torch.stack(R) if case.bidirectional else R[0]}
    found["dinput_weight"] = torch.cat(parameters("weight_ih"))
    if "bias" in case.arrays:
        found["dbias"] = torch.cat(parameters("bias_ih"))
    if "secondary_bias" in case.arrays:  # the part of bias_hh that belongs to the candidate, the last of three gates
        found["dsecondary_bias"] = torch.cat([value[2 * case.hidden :] for value in parameters("bias_hh")])
    return {name + (f"_l{n}" if n else ""): value for name, value in found.items()}


def state(case: CompareCase, name: str, device: str) -> Any:
    """Return a state [N, D H] of the case (N items, D directions, H units) in torch's layout [D, N, H]. If the case has
    no such state, return zeros that need no gradient."""
    import torch

    N, numbers = case.arrays["source"].shape[1], case.directions * case.hidden
    array = case.arrays[name] if name in case.arrays else np.zeros((N, numbers), case.arrays["source"].dtype)
    stacked = np.stack(np.split(array, case.directions, axis=-1))
    return torch.tensor(stacked, device=device, requires_grad=name in case.arrays)
