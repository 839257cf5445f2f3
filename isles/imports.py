"""What "package.module:name" names: how methods and models of one's own are found."""

from __future__ import annotations

import re
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any


def is_place(text: str) -> bool:
    """Whether `text` has the form package.module:name."""
    return re.fullmatch(r"\w+(\.\w+)*:\w+", text) is not None


def named(key: str, place: str) -> Any:
    """The object at `place`, which has the form package.module:name. ValueError, begun with `key`, where it cannot be
    had.
    """
    module, _, name = place.partition(":")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, SyntaxError) as error:
        raise ValueError(f"{key} cannot be imported: {error}") from error
    except Exception as error:  # the module is the user's: whatever it raises
        raise ValueError(f"{key} cannot be imported: {told(error)}") from error


def told(error: Exception) -> str:
    """An error of a user's own code in one line, with the place where it was raised."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    frames = traceback.extract_tb(error.__traceback__)
    return f"{text} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else text
