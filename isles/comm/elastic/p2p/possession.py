"""The dialler's proof that it has the key of its certificate, said inside TLS with whoever's it has compared.

    certificate (DER), fingerprints of all workers of its island, signature of the fingerprint of who is dialled

Nobody but whom it names reads that signature, and to nobody else is it worth anything: so there is no challenge.
"""

from __future__ import annotations

import ssl
import struct
from collections.abc import Sequence

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from isles.comm import credentials
from isles.comm.credentials import Credentials
from isles.comm.elastic.identity import identity_of
from isles.comm.elastic.p2p.stream import exactly
from isles.comm.sockets.lost import LinkLost

_SIZES = struct.Struct("<HHH")
_DIALS = b"isles dials\0"
_DIGITS = 32  # of a fingerprint
_BY = ec.ECDSA(hashes.SHA256())


def show(talk: ssl.SSLSocket, mine: Credentials, certificates: Sequence[str], host: str) -> None:
    """Prove it to whoever has the certificate of the fingerprint `host`. certificates: of this island. OSError."""
    assert mine.key is not None
    key = serialization.load_pem_private_key(mine.key.read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    der = ssl.PEM_cert_to_DER_cert(mine.certificate.read_text(encoding="ascii"))
    said, island = key.sign(_DIALS + host.encode("ascii"), _BY), "".join(certificates).encode("ascii")
    talk.sendall(_SIZES.pack(len(der), len(said), len(island)) + der + said + island)


def shown(talk: ssl.SSLSocket, host: str, place: int) -> str:
    """The identity of the member whose worker at `place` has dialled this one, of the fingerprint `host`. LinkLost."""
    try:
        der, said, island = (exactly(talk, size) for size in _SIZES.unpack(exactly(talk, _SIZES.size)))
        key = x509.load_der_x509_certificate(der).public_key()
        certificates = [island[at : at + _DIGITS].decode("ascii") for at in range(0, len(island), _DIGITS)]
        if not isinstance(key, ec.EllipticCurvePublicKey) or certificates[place] != credentials.fingerprint(der):
            raise ValueError
        key.verify(said, _DIALS + host.encode("ascii"), _BY)
    except (OSError, EOFError, ValueError, IndexError, InvalidSignature):
        raise LinkLost("it does not show that its certificate is its own") from None
    return identity_of(certificates)
