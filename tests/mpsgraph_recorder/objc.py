"""Linux replacement for PyObjC's `objc`, for tests."""

from contextlib import contextmanager


@contextmanager
def autorelease_pool():
    yield
