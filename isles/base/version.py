"""The version of this package, in a file that brings no code along, so that every room may have it."""

__version__ = "0.1.0"
