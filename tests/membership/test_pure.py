"""The rules of an elastic world know neither clock nor sockets nor torch: lighthouse and virtual clock share them."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import isles.membership

ROOM = Path(isles.membership.__file__).parent
PURE = ["coordinator", "coordinator_state", "data_ledger", "effects", "member", "messages", "round_commit", "run_log"]
PURE += ["swarm_coordinator"]
ALLOWED = {"__future__", "abc", "collections", "dataclasses", "functools", "isles", "json", "math", "statistics"}
ALLOWED |= {"hashlib", "itertools", "operator", "pydantic", "pydantic_core", "types", "typing"}


@pytest.mark.parametrize("name", PURE)
def test_it_imports_nothing_that_has_a_clock(name: str) -> None:
    tree = ast.parse((ROOM / f"{name}.py").read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            for module in modules:
                assert module is not None and module.partition(".")[0] in ALLOWED
                if module.startswith("isles."):
                    assert module == "isles.base.parsing" or module.removeprefix("isles.membership.") in PURE


def test_the_lighthouses_memory_needs_no_torch() -> None:
    code = "import isles.membership.lighthouse, isles.membership.coordinator, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"
