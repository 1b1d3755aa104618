"""Python imports this module when a child process of a simulated Mac starts, so that the child is simulated, too."""

import sys
from pathlib import Path

tests = str(Path(__file__).parents[1])
sys.path.insert(0, tests)
try:
    import simulated_mac
finally:
    sys.path.remove(tests)
simulated_mac.install()
