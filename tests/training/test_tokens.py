"""Tokens of runs on several machines: who makes them, where they are kept, when they are gone."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner

from isles.cli import app
from isles.comm import credentials
from isles.comm.credentials import parse_token
from isles.launch.nodes import NodeSpec
from isles.training.records.tokens import (
    CREDENTIALS,
    VARIABLE,
    forget,
    host_credentials,
    make_token,
    node_token,
    read_token,
)


def test_a_token_that_was_made_before_is_node_0s(tmp_path: Path) -> None:
    """`isles token FILE` on node 0; the run keeps what it needs, so that it resumes without; at the end it is gone."""
    file = tmp_path / "token"
    done = CliRunner().invoke(app, ["token", str(file)])
    assert done.exit_code == 0 and stat.S_IMODE(file.stat().st_mode) == 0o600
    token = parse_token(f"@{file}")
    assert token.secret not in done.output and token.secret not in repr(NodeSpec(token=token))
    mine, fresh = host_credentials(tmp_path, token)
    assert mine.token == token and not fresh and mine.key is not None
    assert host_credentials(tmp_path, None) == host_credentials(tmp_path, token) == (mine, False)
    paths = list((tmp_path / CREDENTIALS).iterdir())
    assert len(paths) == 3 and all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in paths)
    forget(tmp_path)
    assert not (tmp_path / CREDENTIALS).exists()


def test_a_token_of_another_machine_is_refused_on_node_0(tmp_path: Path) -> None:
    other = credentials.found(tmp_path / "other").token
    with pytest.raises(ValueError, match="was not made on this machine, which is node 0"):
        host_credentials(tmp_path, other)
    mine, fresh = host_credentials(tmp_path, None)
    assert fresh and mine.token != other


def test_another_node_keeps_the_token_alone(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--token is missing: give the one that node 0 shows"):
        node_token(tmp_path / "run", None)
    token = make_token()
    assert node_token(tmp_path / "run", token) == node_token(tmp_path / "run", None) == token
    (path,) = (tmp_path / "run" / CREDENTIALS).iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_where_a_token_may_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    token = make_token()
    monkeypatch.setenv(VARIABLE, str(token))
    assert read_token(None, 1) is None and read_token(None, 2) == token
    assert read_token("ab" * 32, 2) == parse_token("ab" * 32)
    with pytest.raises(ValueError, match="--token is for several machines"):
        read_token(str(token), 1)
    with pytest.raises(ValueError, match="3 characters that are not the 64 hex digits"):
        read_token("abc", 2)
