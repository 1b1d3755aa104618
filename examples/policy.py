"""Reinforcement learning: a policy with memory learns a game; its states are reset when an episode ends.

    python examples/policy.py  # an optional argument is the number of rollouts

In the game a sign says left or right. Then a corridor of random length follows. At the end of the corridor the player
must choose the side of the sign to win. When an episode ends, the states of that game are reset to zero. While the
policy plays, step by step, the program multiplies the states by 0. When the program computes the gradient of a whole
rollout at once, the argument `keep` (a factor on the states, 0 or 1 for each step) makes the same resets.
"""

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from support.command import numbers, run_main
from support.curves import draw

from mlx_lstm.nn import LSTM

GAMES, STEPS, HIDDEN = 64, 24, 32  # games in parallel, steps of a rollout, units of the LSTM


class Corridors:
    """All games, played in parallel. `act` plays one step and returns the rewards (1 or -1 at an end, else 0) and which
    games end. A game that ends starts again."""

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
    """Play all games for `steps` steps. Return {name: array [GAMES, steps]} and the last states."""
    records = []
    for _ in range(steps):
        scores, state = policy.step(mx.array(seen := games.seen), state)
        right = rng.random(GAMES) < np.array(mx.sigmoid(scores))
        rewards, ends = games.act(right)
        state = [states * mx.array(~(ends | wipe))[:, None] for states in state]  # reset the states of ended games
        records.append((seen, np.array(scores), right, rewards, ends))
    arrays = (np.stack(values, axis=1) for values in zip(*records, strict=True))
    return dict(zip(("seen", "scores", "right", "rewards", "ends"), arrays, strict=True)), state


def loss(policy, played, state):
    """Return the REINFORCE loss, which makes winning actions more likely and losing ones less, and how far the scores
    are from those of single steps. Only the last action of an episode has a reward, so only this action counts."""
    played = {name: mx.array(values) for name, values in played.items()}
    keep = mx.concatenate([mx.ones((GAMES, 1), mx.bool_), ~played["ends"][:, :-1]], axis=1)  # False: a new episode
    scores = policy(played["seen"], state, keep)
    surprise = nn.losses.binary_cross_entropy(scores, played["right"].astype(mx.float32), reduction="none")
    apart = mx.abs(scores - played["scores"]).max()  # largest difference from the scores of single steps
    return (surprise * played["rewards"]).sum() / GAMES, apart


def main(rollouts=30):
    """Train the policy, play with and without the memory, and draw the curve."""
    mx.random.seed(0)
    rng = np.random.default_rng(0)
    policy, games, state = Policy(), Corridors(rng), [mx.zeros((GAMES, HIDDEN))] * 2
    optimizer, gradients_of, curve = optim.Adam(1e-2), nn.value_and_grad(policy, loss), []
    for n in range(1, rollouts + 1):
        before, (played, state) = state, rollout(policy, games, state, rng)
        (_, apart), gradients = gradients_of(policy, played, before)
        optimizer.update(policy, gradients)
        curve.append(100 * (played["rewards"] > 0).sum() / played["ends"].sum())
        if n % 5 == 0 or n == rollouts:
            print(f"rollout {n:2}: {curve[-1]:.0f}% won; scores at once and when acting {apart.item():.0e} apart")
    plays = [rollout(policy, games, state, rng, 5 * STEPS, wipe)[0] for wipe in (False, True)]
    ours, wiped = ((play["rewards"] > 0).sum() / play["ends"].sum() for play in plays)
    print(f"won: {ours:.1%}; with the memory wiped at every step: {wiped:.1%}")
    lines = {"training": curve, "the trained policy, memory wiped": 100 * float(wiped)}
    draw("policy", "A policy learns to remember", lines, xlabel="rollout", ylabel="episodes won, %")


if __name__ == "__main__":
    run_main(lambda: main(*numbers(__doc__)))
