"""The credentials of a run: its certificate, its secret, and the token that combines both.

    token = first 16 bytes of the SHA-256 of the certificate (DER) + 16 random bytes, as 64 hex digits

With the token a machine can recognize the run's machine (first half) and prove to it that it knows the secret (second
half). The certificate is self-signed; it is trusted because its fingerprint is in the token. Each run has its own
token.

    found(folder) -> Credentials      for a new run: key, certificate and secret in `folder`
    read(folder)                      of an existing run
    own(secret, folder)               for a member that others dial directly

A joiner needs only the token: see `isles.comm.sockets.proof`.

Files are 0600 in a folder of 0700. Secrets never appear in an error or a repr.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import os
import secrets
import ssl
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

CERTIFICATE, KEY, SECRET = "certificate.pem", "key.pem", "secret"
NAME = "isles"  # the certificate's subject; not checked, because the fingerprint is
_HALF = 32  # hex digits of each half of a token
_DAYS = 365
_SKEW = datetime.timedelta(days=1)  # clocks of home machines


@dataclass(frozen=True)
class Token:
    """fingerprint: of the run's certificate. secret: known to its members. 32 lower-case hex digits each."""

    fingerprint: str
    secret: str = field(repr=False)

    def __str__(self) -> str:
        return self.fingerprint + self.secret


@dataclass(frozen=True)
class Credentials:
    """One machine's credentials of a run. certificate, key: files; key: None if this machine does not have it."""

    token: Token
    certificate: Path
    key: Path | None


def parse_token(text: str) -> Token:
    """A token as the user gives it: 64 hex digits, or `@FILE` that holds them.

    ValueError, one line that does not show the text, for anything else.
    """
    text = text.strip()
    if text.startswith("@"):
        try:
            text = Path(text[1:]).expanduser().read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is no text"
            raise ValueError(f"token: {text[1:]} cannot be read ({reason}); name the file that holds it") from None
    text = text.lower()
    if len(text) != 2 * _HALF or not set(text) <= set("0123456789abcdef"):
        raise ValueError(
            f"token: {len(text)} characters that are not the 64 hex digits of a run's token; copy the whole of it, or "
            "give the file: @FILE"
        )
    return Token(text[:_HALF], text[_HALF:])


def fingerprint(der: bytes) -> str:
    """The half of a token that identifies a certificate."""
    return hashlib.sha256(der).hexdigest()[:_HALF]


def found(folder: Path, *, now: datetime.datetime | None = None) -> Credentials:
    """Make the key, the certificate (P-256, a year) and the secret of a new run in `folder`.

    ValueError if there are some already: they belong to a run.
    """
    if any((folder / name).exists() for name in (CERTIFICATE, KEY, SECRET)):
        raise ValueError(f"{folder} holds the credentials of a run already; go on with them, or choose another folder")
    return own(secrets.token_hex(_HALF // 2), folder, now=now)


def own(secret: str, folder: Path, *, now: datetime.datetime | None = None) -> Credentials:
    """Make a key and a certificate (P-256, a year) of this machine's own in `folder`, with the `secret` of its run. A
    worker listens with them, so that the run's key never leaves the lighthouse.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    now = now or datetime.datetime.now(datetime.UTC)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, NAME)])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + datetime.timedelta(days=_DAYS))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(NAME)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    form = serialization.PrivateFormat.PKCS8
    pem = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    write_private(folder / KEY, pem)
    write_private(folder / SECRET, secret.encode("ascii"))
    write_private(
        folder / CERTIFICATE, certificate.public_bytes(serialization.Encoding.PEM)
    )  # last, so that its presence means that all files are complete
    return read(folder)


def read(folder: Path) -> Credentials:
    """The credentials in `folder`. ValueError if they are missing, damaged or readable by other users."""
    certificate, key, secret = folder / CERTIFICATE, folder / KEY, folder / SECRET
    for path in (certificate, secret):
        if not path.exists():
            raise ValueError(f"{folder} holds no credentials of a run ({path.name} is missing)")
    for path in (certificate, key, secret):
        if path.exists() and path.stat().st_mode & 0o077:
            raise ValueError(f"{path} can be read by others; take it from them: chmod 600 {path}")
    try:
        half = fingerprint(ssl.PEM_cert_to_DER_cert(certificate.read_text(encoding="ascii")))
        token = parse_token(half + secret.read_text(encoding="ascii").strip())
    except ValueError:
        raise ValueError(f"{folder}: the credentials of the run are damaged; start a new run") from None
    return Credentials(token, certificate, key if key.exists() else None)


def server_context(credentials: Credentials) -> ssl.SSLContext:
    """TLS 1.3 as server with the run's certificate. ValueError without its key."""
    if credentials.key is None:
        raise ValueError(f"{credentials.certificate.parent} holds no key: only the machine that made the run has it")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(credentials.certificate, credentials.key)
    return context


def unverified_context() -> ssl.SSLContext:
    """TLS 1.3 as client without verification: the caller compares the certificate's fingerprint before sending data."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def expired(der: bytes, now: datetime.datetime) -> bool:
    """Whether a certificate is not valid any more, or not yet."""
    certificate = x509.load_der_x509_certificate(der)
    return not certificate.not_valid_before_utc <= now <= certificate.not_valid_after_utc


def stale(mine: Credentials) -> bool:
    """Whether the certificate is not valid any more."""
    der = ssl.PEM_cert_to_DER_cert(mine.certificate.read_text(encoding="ascii"))
    return expired(der, datetime.datetime.now(datetime.UTC))


def challenge() -> bytes:
    """32 random bytes, new for every connection, so that an overheard proof is worthless."""
    return secrets.token_bytes(32)


def proof(token: Token, speaker: str, own: bytes, other: bytes) -> bytes:
    """HMAC-SHA256 of the speaker and both challenges, 32 bytes that only a holder of the token can compute.

    speaker: the role, such as "node" or "lighthouse"; the two sides of a connection must differ in it, or one could
    reply with the other's proof. own, other: the challenges that the speaker sent and received.
    """
    signed = b"isles proof\0" + speaker.encode("ascii") + b"\0" + token.fingerprint.encode("ascii") + own + other
    return hmac.new(token.secret.encode("ascii"), signed, hashlib.sha256).digest()


def proved(received: bytes, token: Token, speaker: str, own: bytes, other: bytes) -> bool:
    """Whether `received` is the `proof` of that speaker, compared in constant time."""
    return hmac.compare_digest(received, proof(token, speaker, own, other))


def write_private(path: Path, data: bytes) -> None:
    """Write a file that only this user can read, atomically and never readable by others."""
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")  # its own: two processes may write it at once
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(descriptor, 0o600)
        file.write(data)
        file.flush()
        os.fsync(descriptor)
    os.replace(part, path)
