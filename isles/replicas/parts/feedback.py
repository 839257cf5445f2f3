"""Error feedback as a setting."""

from __future__ import annotations

from typing import Literal, get_args

from isles.replicas.checks import one_of
from isles.replicas.parts.interfaces import ErrorFeedback

Feedback = Literal["none", "local", "global"]


def check_feedback(form: str, decay: float) -> None:
    """ValueError for what is no error feedback."""
    one_of("error_feedback", form, get_args(Feedback))
    if not 0 <= decay <= 1:
        raise ValueError(f"feedback_decay = {decay}: choose 0 to 1, such as 0.95")
    if form == "none" and decay != 1:
        raise ValueError(
            f'feedback_decay = {decay} has no error feedback to act on: set error_feedback = "local", or this to 1'
        )


def feedback(form: Feedback, decay: float) -> ErrorFeedback | None:
    """The part that the settings name."""
    return None if form == "none" else ErrorFeedback(form=form, decay=decay)
