"""Run parts of the commands in child processes, because a GPU driver may end a process and a kernel may hang."""

from typing import Any

from ..ground.child import LIMIT, Child
from ..ground.machine import module_command


def start(kind: str, argument: str) -> Child:
    """Start the child process `python -m mlx_lstm.lab KIND ARGUMENT`, which answers requests."""
    return Child(module_command("mlx_lstm.lab", kind, argument))


class Runner:
    """An object that sends requests to a child process. It starts the child with the first request, and a new child
    after a crash. kind, argument: the arguments of the child's command `python -m mlx_lstm.lab KIND ARGUMENT`."""

    def __init__(self, kind: str, argument: str):
        self.kind, self.argument = kind, argument
        self.child: Child | None = None

    def ask(self, limit: float = LIMIT, **request: Any) -> dict[str, Any]:
        """Send a request (the keywords) to the child and return its answer. Raise ChildError if the child fails, ends
        or gives no answer within `limit` seconds."""
        if self.child is None or not self.child.serves():
            self.child = start(self.kind, self.argument)
        return self.child.ask(limit, **request)

    def close(self) -> None:
        if self.child is not None:
            self.child.close()
