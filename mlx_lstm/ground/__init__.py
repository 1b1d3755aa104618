"""Helpers that every module of the package may import: checks of arguments, files, child processes, the machine."""
