"""Helpers that every floor may import: checks of arguments, files, child processes, the machine."""
