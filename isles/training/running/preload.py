"""What the fork server loads, once for all workers; see `server`. Imported for its imports alone."""

from __future__ import annotations

import torch._dynamo  # noqa: F401  # the first optimizer of a process loads it: a second of CPU time in every worker

import isles.training.running.processes  # noqa: F401
