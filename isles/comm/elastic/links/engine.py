"""Parts of `session`: its engine's questions and settings (TLS always, no discovery, what whoever is let in may do)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from isles.comm.credentials import Credentials, write_private
from isles.comm.elastic.keys import PRESENT_AS_SEATS, SERVED_BY_SEATS

MAX_MESSAGE = 4 << 20
USER = "isles"
Mode = Literal["router", "client"]


class IncomingQuery:
    """See `isles.comm.elastic.control.Query`."""

    def __init__(self, query: Any, post: Callable[[Callable[[], None], int], None]) -> None:
        self._query, self._post = query, post

    @property
    def payload(self) -> bytes:
        return b"" if self._query.payload is None else self._query.payload.to_bytes()

    @property
    def attachment(self) -> bytes:
        return b"" if self._query.attachment is None else self._query.attachment.to_bytes()

    def reply(self, data: bytes | Callable[[], bytes] = b"") -> None:
        query, size = self._query, len(data) if isinstance(data, bytes) else 0
        self._post(
            lambda: query.reply(query.key_expr, data if isinstance(data, bytes) else data()), size_of(query) + size
        )

    def refuse(self, why: bytes) -> None:
        query = self._query
        self._post(lambda: query.reply_err(why), size_of(query))


class Alarm:
    """See `isles.comm.elastic.control.Timer`."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call: Callable[[], None] | None = call

    def cancel(self) -> None:
        self._call = None

    def ring(self, _: Any = None) -> None:
        call = self._call
        if call is not None:
            call()


def size_of(query: Any) -> int:
    """Bytes that a question holds."""
    return 1024 + (0 if query.payload is None else len(query.payload))


def settings(
    mode: Mode, credentials: Credentials, listen: str | None, connect: str | None, lease: float, patience: float
) -> dict[str, Any]:
    """The engine's, by key; see `isles.comm.elastic.session.open_session`."""
    users = credentials.certificate.parent / "users"  # the engine reads passwords from a file
    write_private(users, f"{USER}:{credentials.token.secret}\n".encode("ascii"))
    tls: dict[str, Any] = {"root_ca_certificate": str(credentials.certificate), "verify_name_on_connect": False}
    if credentials.key is not None:
        tls |= {"listen_private_key": str(credentials.key), "listen_certificate": str(credentials.certificate)}
    return {
        "mode": mode,
        "listen/endpoints": [f"tls/{listen}"] if listen else [],
        "connect/endpoints": [f"tls/{connect}"] if connect else [],
        "connect/timeout_ms": round(1000 * patience),
        "scouting/multicast/enabled": False,
        "transport/shared_memory/enabled": False,
        "transport/link/tx/lease": round(1000 * lease),
        "transport/link/tx/queue/congestion_control/block/wait_before_close": round(1e6 * lease),
        "transport/link/rx/max_message_size": MAX_MESSAGE,
        "transport/link/tls": tls,
        "transport/auth/usrpwd": {
            "user": USER,
            "password": credentials.token.secret,
            "dictionary_file": str(users),
        },
        "adminspace/enabled": False,
        **({"access_control": _rights()} if mode == "router" else {}),
    }


def _rights() -> dict[str, Any]:
    """What whoever is let in may do at a router: all but serve, or be seen, where the lighthouse is."""
    looks = ["declare_subscriber", "declare_liveliness_subscriber", "liveliness_query"]
    speaks = ["put", "delete", "query", "reply", *looks]
    serves, is_seen = "declare_queryable", "liveliness_token"

    def may(name: str, messages: list[str], flow: str, keys: Sequence[str]) -> dict[str, Any]:
        return {"id": name, "permission": "allow", "messages": messages, "flows": [flow], "key_exprs": [*keys]}

    rules = [
        may("speaks", speaks, "ingress", ["**"]),
        may("serves", [serves], "ingress", SERVED_BY_SEATS),
        may("is seen", [is_seen], "ingress", PRESENT_AS_SEATS),
        may("hears", [*speaks, serves, is_seen], "egress", ["**"]),
    ]
    return {
        "enabled": True,
        "default_permission": "deny",
        "rules": rules,
        "subjects": [{"id": "whoever is let in"}],
        "policies": [{"rules": [each["id"] for each in rules], "subjects": ["whoever is let in"]}],
    }
