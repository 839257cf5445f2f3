"""Somebody's first hour, by the commands of docs/recipes.md: from a Hugging Face folder to a model that others load,
and a job of Slurm that is taken off its machine.
"""

from __future__ import annotations

import importlib.util
import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.newcomer.folder import write_folder
from tests.newcomer.page import TASK, call, commands
from tests.slurm import slurm
from tests.training.runs import write_folder as write_tiny

pytestmark = pytest.mark.long


def test_from_a_hugging_face_folder_to_lm_eval(tmp_path: Path) -> None:
    """At most eight commands, each as printed; without lm-eval the last one says what to install."""
    transformers = pytest.importorskip("transformers", reason="needs the extra hf")
    typed = commands("From a Hugging Face folder to lm-eval")
    assert len(typed) <= 8 and typed[0] == 'pip install ".[hf]"'  # which has been done here
    write_folder(tmp_path)
    questions = [{"ctx": "the", "endings": [" of the object", "~~{{~~"], "label": 0}] * 4
    (tmp_path / "my-questions.jsonl").write_text("".join(json.dumps(one) + "\n" for one in questions))
    (tmp_path / "my-task.yaml").write_text(TASK)
    said = [call(command, tmp_path) for command in typed[1:-1]]
    loss = float(re.findall(r"loss +(\d+\.\d+) nats/token", said[1])[0])
    summary = json.loads((tmp_path / "runs" / "mine" / "summary.json").read_text())
    assert loss == pytest.approx(summary["val_loss"], abs=1e-4) and loss < 5.2  # 6.24: chance among 512 ids
    folder = tmp_path / "runs" / "mine" / "export-hf"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("The value of the object", return_tensors="pt").input_ids
    assert tokenizer.decode(model.generate(ids, max_new_tokens=3)[0]).startswith("The value of the object")
    if importlib.util.find_spec("lm_eval") is None:
        with pytest.raises(AssertionError, match="pip install lm-eval"):
            call(typed[-1], tmp_path)
    else:
        assert re.search(r"^my-task +acc +1\.0$", call(typed[-1], tmp_path), re.MULTILINE)


def test_a_job_that_is_taken_off_its_machine(tmp_path: Path) -> None:
    """`scontrol requeue` in the middle: the job saves, is queued, goes on, and ends with the bits of a run that nobody
    stopped.
    """
    write_tiny(tmp_path)
    config = (tmp_path / "tiny.toml").read_text().replace("[replicas]", '[replicas]\nmethod = "own:Slow"')
    (tmp_path / "my.toml").write_text(config + "steps = 300\n")
    script, submit, watch = commands("Slurm")
    with slurm(tmp_path) as cluster:
        call(script, tmp_path, **cluster)
        job = call(submit, tmp_path, **cluster).split()[-1]
        log, run = tmp_path / f"my-{job}.log", tmp_path / "runs" / "my"
        metrics = run / "metrics.jsonl"
        eventually(lambda: metrics.exists() and metrics.stat().st_size, log)
        call(f"scontrol requeue {job}", tmp_path, **cluster)
        eventually(lambda: "PENDING" in call(f"{watch} --format %T", tmp_path, **cluster), log)
        assert not (run / "summary.json").exists()
        saved = [int(one.name.removeprefix("step-")) for one in (run / "checkpoints").glob("step-*")]
        call(f"scontrol update JobId={job} StartTime=now", tmp_path, **cluster)  # Slurm waits two minutes by itself
        eventually((run / "summary.json").exists, log)
        eventually(lambda: job not in call(watch, tmp_path, **cluster), log)
    assert len(saved) == 1 and f"resuming runs/my after step {saved[0]}" in log.read_text()
    call("isles train my.toml --workers 2 --method noloco --out whole", tmp_path)
    assert (run / "model.safetensors").read_bytes() == (tmp_path / "whole" / "model.safetensors").read_bytes()


def eventually(look: Callable[[], object], log: Path, seconds: float = 120.0) -> None:
    ends_at = time.monotonic() + seconds
    while not look():
        assert time.monotonic() < ends_at, log.read_text() if log.exists() else "no log"
        time.sleep(0.3)
