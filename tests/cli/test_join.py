"""`isles join --workers M`: processes of their own, which are asked once to leave. A script stands in for them."""

from __future__ import annotations

import os
import signal
import stat
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from isles.cli.elastic import join as command
from isles.training.records.tokens import make_token

LEAVES = """#!/bin/sh
asked=0
trap 'asked=$((asked + 1))' TERM INT
touch "$3.$$.here"
for _ in 1 2 3 4 5; do sleep 0.1; done
echo $asked $ISLES_TOKEN > "$3.$$.done"
"""


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(command, "end_in_order", lambda: None)  # pytest keeps its own handlers
    script = folder / "worker"
    script.write_text(text.replace("$3", str(folder / "was")))
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(script))


def type_ctrl_c(folder: Path) -> None:
    """To all that a terminal would give it: this process, and its children of the same group."""
    while len(list(folder.glob("was.*.here"))) < 2:
        time.sleep(0.01)
    for child in psutil.Process().children():
        if os.getpgid(child.pid) == os.getpgid(0):
            child.send_signal(signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_asks_each_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second signal would end it within its round. The token may be in a file below ~."""
    monkeypatch.setenv("HOME", str(tmp_path))
    token = str(make_token())
    (tmp_path / "token").write_text(token)
    stand_in(tmp_path, monkeypatch, LEAVES)
    typing = threading.Thread(target=type_ctrl_c, args=(tmp_path,))
    typing.start()
    with pytest.raises(BaseException) as ended:  # click's Exit, which is no Exception of ours
        command.join("127.0.0.1:9", token="@~/token", workers=2, data=None, device=None)
    typing.join()
    assert getattr(ended.value, "exit_code", None) == 0, ended.value
    assert [path.read_text() for path in tmp_path.glob("was.*.done")] == [f"1 {token}\n"] * 2


def test_one_that_is_killed_is_no_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, monkeypatch, "#!/bin/sh\nkill -9 $$\n")
    with pytest.raises(BaseException) as ended:
        command.join("127.0.0.1:9", token=str(make_token()), workers=2, data=None, device=None)
    assert getattr(ended.value, "exit_code", None) == 128 + 9
