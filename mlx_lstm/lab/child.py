"""Start child processes of the commands: a driver may end a process, and a kernel may hang."""

from typing import Any

from ..ground.child import LIMIT, Child
from ..ground.machine import module_command


def start(kind: str, argument: str) -> Child:
    """Start a child process that answers requests of this kind: see `mlx_lstm.lab.__main__`."""
    return Child(module_command("mlx_lstm.lab", kind, argument))


class Runner:
    """Sends requests to a child process. It starts the child with the first request, and a new one after a crash.
    kind, argument: which program the child runs, and the program's argument."""

    def __init__(self, kind: str, argument: str):
        self.kind, self.argument = kind, argument
        self.child: Child | None = None

    def ask(self, limit: float = LIMIT, **request: Any) -> dict[str, Any]:
        """Return the child's answer to a request, whose keywords the program defines. Raise ChildError if the child
        fails, ends or gives no answer within `limit` seconds."""
        if self.child is None or not self.child.serves():
            self.child = start(self.kind, self.argument)
        return self.child.ask(limit, **request)

    def close(self) -> None:
        """End the child process, if there is one."""
        if self.child is not None:
            self.child.close()
