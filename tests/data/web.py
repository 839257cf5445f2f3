"""A web server of this machine for tests: a folder with its listings, and connections that fail."""

from __future__ import annotations

import contextlib
import http.server
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any


class Web:
    """url: of the folder. requests: "HEAD /name", in order. cut: how often the next bodies of a file end in the middle,
    by its name. page: the listing instead of the folder's own, by the folder's name. wait: blocks each body.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.requests: list[str] = []
        self.cut: dict[str, int] = {}
        self.page: dict[str, str] = {}
        self.shrinks: set[str] = set()
        self.wait: threading.Event | None = None

    def fetched(self) -> list[str]:
        """The files whose content was asked for."""
        return [line[5:] for line in self.requests if line.startswith("GET /") and not line.endswith("/")]


class _Handler(http.server.SimpleHTTPRequestHandler):
    def __init__(self, *args: Any, web: Web, **more: Any) -> None:
        self.web = web
        super().__init__(*args, **more)

    def log_message(self, *_: Any) -> None: ...

    def list_directory(self, path: Any) -> Any:
        page = self.web.page.get(self.path.strip("/"))
        if page is None:
            return super().list_directory(path)
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(page.encode())))
        self.end_headers()
        self.wfile.write(page.encode())
        return None

    def send_head(self) -> Any:
        self.web.requests.append(f"{self.command} {self.path}")
        return super().send_head()

    def copyfile(self, source: Any, outputfile: Any) -> None:
        name, data = self.path[1:], source.read()
        if self.web.wait is not None and name:
            self.web.wait.wait(60)
        if self.web.cut.get(name, 0) > 0:
            self.web.cut[name] -= 1
            data = data[: len(data) // 2]
            self.close_connection = True
        if name in self.web.shrinks:
            data = data[: len(data) // 2]
        with contextlib.suppress(OSError):  # the client may want no more
            outputfile.write(data)

    def send_header(self, keyword: str, value: str) -> None:
        if keyword == "Content-Length" and self.path[1:] in self.web.shrinks and self.command == "GET":
            value = str(int(value) // 2)
        super().send_header(keyword, value)


@contextlib.contextmanager
def serve(folder: Path) -> Iterator[Web]:
    """Context: the folder as a server shows it."""
    web = Web("")
    handler = partial(_Handler, directory=str(folder), web=web)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        web.url = f"http://127.0.0.1:{server.server_port}/"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield web
        finally:
            server.shutdown()
            thread.join(10)
