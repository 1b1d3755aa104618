"""A policy that has to remember, trained on rollouts in the middle of which episodes end.

    python examples/policy.py  # a number behind it is that of rollouts

The game: a sign says left or right, a corridor of random length follows, and at its end the sign's side wins. After an
episode the game's row of the states is zero: when acting by a product, and for the gradient, over the whole rollout at
once, by `keep`.
"""

import sys

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np

from mlx_lstm.nn import LSTM

GAMES, STEPS, HIDDEN = 64, 24, 32  # games at once, steps of a rollout


class Corridors:
    """All games. An action gives rewards, 1 or -1 at an end and else 0, and which games end; these begin anew."""

    def __init__(self, rng):
        self.rng, self.sign, self.left = rng, np.zeros(GAMES, int), np.zeros(GAMES, int)
        self.act(right=True)

    def act(self, right):
        ends = self.left == 0
        rewards = np.where(right, self.sign, -self.sign) * ends
        self.sign = np.where(ends, self.rng.choice([-1, 1], GAMES), self.sign)
        self.left = np.where(ends, self.rng.integers(2, 10, GAMES), self.left - 1)
        noise = self.rng.normal(size=GAMES)
        self.seen = np.stack([self.sign * ends, self.left == 0, noise], axis=-1).astype(np.float32)  # sign, end, noise
        return rewards, ends


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = LSTM(3, HIDDEN), nn.Linear(HIDDEN, 1)

    def __call__(self, seen, state, keep):
        return self.head(self.lstm(seen, *state, keep=keep)[0])[..., 0]  # a score for going right

    def step(self, seen, state):
        state = self.lstm.step(seen, *state)
        return self.head(state[0])[..., 0], state


def rollout(policy, games, state, rng, steps=STEPS, wipe=False):
    """All games, step by step: arrays [GAMES, steps] by name, and the states [GAMES, HIDDEN] after them."""
    kept = []
    for _ in range(steps):
        scores, state = policy.step(mx.array(seen := games.seen), state)
        right = rng.random(GAMES) < np.array(mx.sigmoid(scores))
        rewards, ends = games.act(right)
        state = [states * mx.array(~(ends | wipe))[:, None] for states in state]  # the reset
        kept.append((seen, np.array(scores), right, rewards, ends))
    arrays = (np.stack(values, axis=1) for values in zip(*kept, strict=True))
    return dict(zip(("seen", "scores", "right", "rewards", "ends"), arrays, strict=True)), state


def loss(policy, kept, state):
    """Less likely what lost, more likely what won (REINFORCE): an episode's last action is the one that counts."""
    kept = {name: mx.array(values) for name, values in kept.items()}
    goes_on = mx.concatenate([mx.ones((GAMES, 1), mx.bool_), ~kept["ends"][:, :-1]], axis=1)
    scores = policy(kept["seen"], state, goes_on)
    surprise = nn.losses.binary_cross_entropy(scores, kept["right"].astype(mx.float32), reduction="none")
    apart = mx.abs(scores - kept["scores"]).max()  # from what acting gave, step by step
    return (surprise * kept["rewards"]).sum() / GAMES, apart


def main(rollouts=30):
    """Train, then play with the memory and without."""
    mx.random.seed(0)
    rng = np.random.default_rng(0)
    policy, games, state = Policy(), Corridors(rng), [mx.zeros((GAMES, HIDDEN))] * 2
    optimizer, gradients_of = optim.Adam(1e-2), nn.value_and_grad(policy, loss)
    for n in range(1, rollouts + 1):
        before, (kept, state) = state, rollout(policy, games, state, rng)
        (_, apart), gradients = gradients_of(policy, kept, before)
        optimizer.update(policy, gradients)
        if n % 5 == 0 or n == rollouts:
            won = (kept["rewards"] > 0).sum() / kept["ends"].sum()
            print(f"rollout {n:2}: {won:.0%} won; scores at once and when acting {apart.item():.0e} apart")
    plays = [rollout(policy, games, state, rng, 5 * STEPS, wipe)[0] for wipe in (False, True)]
    ours, wiped = ((play["rewards"] > 0).sum() / play["ends"].sum() for play in plays)
    print(f"won: {ours:.1%}; with the memory wiped at every step: {wiped:.1%}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:])) if all(map(str.isdigit, sys.argv[1:])) else sys.exit(__doc__)
