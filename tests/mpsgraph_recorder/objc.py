"""Replacement for PyObjC's `objc` on Linux."""

from contextlib import contextmanager


@contextmanager
def autorelease_pool():
    yield
