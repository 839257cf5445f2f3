"""Tokens, certificates and files of a run: real TLS on loopback, and what strangers get."""

from __future__ import annotations

import asyncio
import datetime
import os
import socket
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from isles.comm import credentials
from isles.comm.credentials import Credentials, Token
from isles.comm.sockets import loop
from isles.comm.sockets.connection import close
from isles.comm.sockets.listener import Listener
from isles.comm.sockets.proof import SecretRefused, TokenRefused, dial
from isles.comm.tcp import listen


@contextmanager
def answering(mine: Credentials | None, says: bytes = b"hello") -> Iterator[int]:
    """A port of loopback where something answers: in TLS, to whoever proves that it knows the token, or (None) in plain
    bytes.
    """

    async def hear(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(says)
        await close(writer)

    listening = listen(0, "127.0.0.1")
    with Listener(listening, hear, seconds=5.0, mine=mine):
        yield listening.getsockname()[1]


def dialled(port: int, token: Token, seconds: float = 5.0) -> tuple[str, bytes]:
    """The version of TLS, and what is said."""

    async def come() -> tuple[str, bytes]:
        reader, writer = await dial("127.0.0.1", port, seconds, token)
        try:
            return writer.get_extra_info("ssl_object").version(), await reader.read(5)
        finally:
            writer.transport.abort()

    return loop.run(come(), 10.0)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Credentials:
    return credentials.found(tmp_path_factory.mktemp("run") / "credentials")


def test_a_run_is_read_as_it_was_made(run: Credentials) -> None:
    assert credentials.read(run.certificate.parent) == run
    assert credentials.parse_token(str(run.token)) == run.token
    assert len(str(run.token)) == 64
    for path in (run.certificate, run.key, run.certificate.parent / "secret"):
        assert path is not None and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(run.certificate.parent.stat().st_mode) == 0o700
    assert run.token.secret not in repr(run)
    with pytest.raises(ValueError, match="holds the credentials of a run already"):
        credentials.found(run.certificate.parent)


def test_two_runs_differ(run: Credentials, tmp_path: Path) -> None:
    other = credentials.found(tmp_path / "other").token
    assert other.fingerprint != run.token.fingerprint and other.secret != run.token.secret


def test_a_joiner_trusts_the_certificate_of_its_token_and_nothing_else(run: Credentials, tmp_path: Path) -> None:
    with answering(run) as port:
        assert dialled(port, run.token) == ("TLSv1.3", b"hello")
        with pytest.raises(SecretRefused, match="does not take this token"):
            dialled(port, Token(run.token.fingerprint, "0" * 32))
    with pytest.raises(ValueError, match="holds no key"):
        credentials.server_context(replace(run, key=None))
    impostor = replace(credentials.found(tmp_path / "impostor"), token=run.token)  # it knows all but the key
    with answering(impostor) as port, pytest.raises(TokenRefused, match=f":{port} is not the machine of this token"):
        dialled(port, run.token)


def test_an_expired_certificate_is_refused(tmp_path: Path) -> None:
    old = credentials.found(tmp_path / "old", now=datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC))
    with answering(old) as port, pytest.raises(TokenRefused, match="has expired"):
        dialled(port, old.token)


def test_what_speaks_no_tls_or_nothing_at_all(run: Credentials) -> None:
    with answering(None, b"SSH-2.0-OpenSSH_9.2\r\n") as port:
        with pytest.raises(OSError):
            dialled(port, run.token)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes the connection and says nothing
        with pytest.raises(TimeoutError):
            dialled(silent.getsockname()[1], run.token, 0.3)
    with pytest.raises(OSError):
        dialled(1, run.token)


@pytest.mark.parametrize("text", ["", "abc", "g" * 64, "0" * 63, "0" * 65, "é" * 64, "@"])
def test_what_is_no_token_is_not_shown(text: str) -> None:
    with pytest.raises(ValueError) as refused:
        credentials.parse_token(text)
    assert "\n" not in str(refused.value) and (not text or text == "@" or text not in str(refused.value))


def test_a_token_from_a_file(run: Credentials, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(f"  {str(run.token).upper()}\n")
    assert credentials.parse_token(f"@{tmp_path / 'token'}") == run.token
    with pytest.raises(ValueError, match="nowhere cannot be read"):
        credentials.parse_token("@nowhere")
    assert str(Token("a" * 32, "b" * 32)) == "a" * 32 + "b" * 32


def test_damaged_open_or_missing_credentials_are_one_line(run: Credentials, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    with pytest.raises(ValueError, match="holds no credentials"):
        credentials.read(folder)
    credentials.found(folder)
    (folder / "secret").chmod(0o644)
    with pytest.raises(ValueError, match="chmod 600"):
        credentials.read(folder)
    credentials.write_private(folder / "secret", b"short")
    with pytest.raises(ValueError, match="damaged"):
        credentials.read(folder)
    credentials.write_private(folder / "secret", b"0" * 32)
    credentials.write_private(folder / "certificate.pem", b"-----BEGIN")
    with pytest.raises(ValueError, match="damaged"):
        credentials.read(folder)


def test_a_proof_is_of_this_token_speaker_and_connection(run: Credentials) -> None:
    mine, theirs = credentials.challenge(), credentials.challenge()
    message = credentials.proof(run.token, "node", mine, theirs)
    assert len(message) == 32 and credentials.proved(message, run.token, "node", mine, theirs)
    wrong = Token(run.token.fingerprint, "0" * 32)
    assert not credentials.proved(message, wrong, "node", mine, theirs)
    assert not credentials.proved(message, run.token, "lighthouse", mine, theirs)  # sent back as it came
    assert not credentials.proved(message, run.token, "node", theirs, mine)
    assert not credentials.proved(message, run.token, "node", credentials.challenge(), theirs)  # said again later
    assert not credentials.proved(b"", run.token, "node", mine, theirs)


def test_a_private_file_is_never_open_to_others(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        path = tmp_path / "file"
        path.write_bytes(b"old")
        path.chmod(0o666)
        credentials.write_private(path, b"new")
    finally:
        os.umask(umask)
    assert path.read_bytes() == b"new" and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_two_processes_write_one_private_file_at_once(tmp_path: Path) -> None:
    """As two sessions on one folder of credentials do; each time one of them is there, whole."""
    path, message = tmp_path / "users", [letter * 5000 for letter in (b"a", b"b")]

    def write(data: bytes) -> None:
        for _ in range(100):
            credentials.write_private(path, data)
            assert path.read_bytes() in message

    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(write, message)] == [None, None]
    assert [entry.name for entry in tmp_path.iterdir()] == ["users"]
