"""The script of `isles launch slurm`, run by bash with stand-ins for Slurm's two commands."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from isles.cli.launch import slurm


def test_the_script_queues_again_where_the_run_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """130: it has saved. 138: SIGUSR1 before it has begun, as while a long text is prepared. No other code."""
    (tmp_path / "my.toml").write_text('[replicas]\nmethod = "diloco"\n[world]\nworkers = 2\n')
    slurm(str(tmp_path / "my.toml"), nodes=1)
    script = capsys.readouterr().out
    for name, line in {"srun": 'exit "$CODE"', "scontrol": 'echo "$@" > again'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    for code, again in ((0, False), (1, False), (2, False), (130, True), (138, True)):
        (tmp_path / "again").unlink(missing_ok=True)
        environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CODE": str(code), "SLURM_JOB_ID": "7"}
        done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment, timeout=60)
        assert (done.returncode, (tmp_path / "again").exists()) == (code, again)
    assert (tmp_path / "again").read_text() == "requeue 7\n"
