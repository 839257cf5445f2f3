"""The six questions of docs/planning.md: the commands that stand there, and the same numbers by hand.

By hand means from the numbers of the question alone, with what stands in data sheets and papers:

    computing   6 operations a parameter and token, at 40 % of the GPU's peak (below)
    states      AdamW in float32: 16 bytes a parameter; a method's anchor and momentum 4 each, on the host
    a mean      of n in two shots: each sends 2 (n - 1) / n of what it has; int8: a byte a number each way

To 3 %, for scales of codes (a 64th), whole sequences, and latencies are left out, or to what is said there.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from isles import cli
from isles.plan.run_plan import plan_run
from isles.training.config.reading import read_config

PAGE = (Path(__file__).parents[2] / "docs" / "planning.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("\n## Six questions\n")[2].partition("\n## ")[0]
BLOCKS = [text.strip() for text in re.findall(r"```\n(.*?)```", SECTION, re.DOTALL)]
COMMANDS = [shlex.split(text.replace("\\\n", " ")) for text in BLOCKS[::2]]
ABOUT = 0.03
HOUR = 3600
H100, A100, RTX_4090, RTX_3060 = 989e12, 312e12, 165e12, 51e12  # operations a second, bfloat16

Say = Callable[..., str]
"""answer(question, *more): what its command prints."""


@pytest.fixture
def answer(capfd: pytest.CaptureFixture[str]) -> Say:

    def ask(question: int, *more: str) -> str:
        words = COMMANDS[question - 1]
        assert words[0] == "isles" and cli._command()([*words[1:], *more], "isles", standalone_mode=False) in (0, None)
        return capfd.readouterr().out

    return ask


def row_of(text: str, settings: str) -> dict[str, Any]:
    return next(row for row in json.loads(text)["rows"] if row["settings"] == settings)


def computing(parameters: float, tokens: float, peak: float) -> float:
    """Seconds of a step of so many tokens at one worker."""
    return 6 * parameters * tokens / (0.4 * peak)


def about(value: float, off: float = ABOUT) -> Any:
    return pytest.approx(value, rel=off)


def check(row: dict[str, Any], *, step: float, round_bytes: float, wait: float, own: float, run: list[float]) -> None:
    """A row against seconds of a step, bytes that a worker sends in a round and seconds that it waits then; own: of
    each step, waiting inside its site. run: steps, workers, price of an hour and of a GB.
    """
    every, (steps, workers, hour, gigabyte) = row["sync_every"], run
    share = every * step / (every * (step + own) + wait)
    hours = steps * (step + own + wait / every) / HOUR
    sent = steps / every * workers * round_bytes
    assert row["utilisation"] == about(share)
    assert row["bytes_sent_per_worker_per_step"] == about(round_bytes / every)
    assert (row["hours"], row["bytes_sent"]) == (about(hours), about(sent))
    assert row["money"] == about(workers * hours * hour + sent / 1e9 * gigabyte)


@pytest.mark.long
def test_seven_billion_on_eight_sites(answer: Say) -> None:
    """Eight stages a site, of 128 microbatches: 7 more of their turns fill the pipeline. Eight sites in int8."""
    row = row_of(answer(1, "--method", "diloco", "--json"), "codec = int8")
    assert row["inside"] == "stages" and row["fits"] and row["sync_every"] == 300
    step = computing(7e9, 4e6 / 64, H100)
    site = 2 * 7 / 8 * 7e9  # bytes over its line
    check(
        row,
        step=step,
        own=step * 7 / 128,
        round_bytes=site / 8,
        wait=8 * site / 500e6 + 2 * 60e-3,
        run=[100e9 / 4e6, 64, 2.5, 0.05],
    )
    assert row["device_bytes"] - row["activations"] == about(16 * 7e9 / 8)
    assert row["device_bytes"] < 80e9 < 16 * 7e9  # one GPU has not even the states
    assert row["memory_bytes"] == about((16 + 4 + 4 + 8) * 7e9 / 8)  # at the end the workers' mean, and whose it is


@pytest.mark.long
def test_forty_cards_in_twelve_countries(answer: Say) -> None:
    """The slowest cities upload 20 Mbit/s. fp4 goes there in half a byte and comes back in two. A round of 500 steps is
    longer than its exchange, so only the last exchange of 40 is waited for.
    """
    text = answer(2, "--method", "eager", "--json")
    row, step = row_of(text, "codec = fp4"), computing(1e9, 1e6 / 40, RTX_4090)
    sent = 39 / 40 * (0.5 + 2) * 1e9
    line, rounds = 8 * sent / 20e6, 20e9 / 1e6 / 500
    assert row["sync_every"] == 500 and line < 500 * step
    check(row, step=step, own=0, round_bytes=sent, wait=line / rounds, run=[20e9 / 1e6, 40, 0.35, 0])
    assert row["bandwidth_mbps"]["90"] < 20
    assert row["fits"] and row["device_bytes"] - row["activations"] == about(16e9)


@pytest.mark.long
def test_two_data_centres(answer: Say) -> None:
    """Inside, a mean of float32 gradients among 32 over 50 GB/s; of that the last of 16 batches' backward pass, two
    thirds of its time, hides a part.
    """
    row = row_of(answer(3, "--method", "diloco", "--json"), "codec = int8")
    step = computing(3e9, 4e6 / 64, H100)
    mean = 2 * 31 / 32 * 4 * 3e9 / 50e9
    check(
        row,
        step=step,
        own=mean - step / 16 * 2 / 3,
        round_bytes=2 * 1 / 2 * 3e9 / 32,
        wait=8 * 3e9 / 1e9 + 2 * 10e-3 + 31 / 32 * 4 * 3e9 / 50e9,
        run=[60e9 / 4e6, 64, 2.5, 0.02],
    )
    assert (row["inside"], row["sync_every"]) == ("ddp", 100)
    assert row["device_bytes"] - row["activations"] == about(16 * 3e9)


def test_spot_instances(answer: Say) -> None:
    """5 % of 256 die an hour and others come: half a round of each is lost, each waits three rounds for its view and is
    sent two states, of five float32 models.
    """
    row = row_of(answer(4, "--method", "diloco", "--json"), "codec = int8")
    step, sent = computing(1e9, 2e6 / 256, A100), 2 * 255 / 256 * 1e9
    wait = 8 * sent / 1e9 + 2 * 2e-3
    check(row, step=step, own=0, round_bytes=sent, wait=wait, run=[20e9 / 2e6, 256, 1.2, 0])
    deaths = 0.05 / HOUR * (500 * step + wait)  # of a worker, a round
    costs = row["churn"]
    assert (costs["lost"], costs["state_bytes"]) == (about(deaths / 2, 0.05), about(0.05 * 256 * 2 * 5 * 4e9))
    gone = 1 - math.exp(-3 * deaths)  # by the third round, which nobody waits for in the first two of the run
    assert 0.8 * gone < costs["waiting"] < 1.03 * gone
    assert costs["goodput"] == about(500 * step / (500 * step + wait) * (1 - deaths / 2) * (1 - gone))


@pytest.mark.long
def test_seventy_billion_in_stages(answer: Say) -> None:
    """A tenth of 7,424 numbers a token crosses: forward a byte and the two of its place, backward a byte. 64
    microbatches of 15 sequences; the last stage sends none forward, the first none back. A second forward pass makes
    six operations eight. At the least a pipeline takes 15 more of their turns; latencies and lines add to that.
    """
    row = next(one for one in json.loads(answer(5, "--json"))["rows"] if (one["stages"], one["inner"]) == (16, 1))
    step = computing(70e9, 2e6 / 32, H100) * 8 / 6
    assert row["utilisation"] * row["step_seconds"] == about(step)
    assert row["bytes_to_stages_per_worker_per_step"] == about(15 / 16 * 64 * 15 * 1024 * 742 * (3 + 1))
    outer = 2 * 1 / 2 * 4 * 70e9 / 16  # a round of diloco in float32, of two replicas
    assert row["bytes_to_replicas_per_worker_per_step"] == about(outer / 100)
    assert row["wait_seconds_per_step"] == about(8 * outer / 1e9 / 100, 0.05)
    least = step * (64 + 15) / 64 + row["wait_seconds_per_step"]
    assert least < row["step_seconds"] < 1.3 * least
    assert row["recompute"] and row["fits"] and 16 * 70e9 / 16 < row["device_bytes"] < 141e9
    assert row["memory_bytes"] == about((16 + 4 + 4 + 8) * 70e9 / 16)


def test_one_small_card(answer: Say) -> None:
    """bfloat16 states: 8 bytes a parameter, of which the card has 6 blocks of 32; the host updates the others, 1.2
    billion parameters a second. At the most all blocks run forward twice and nothing goes on beside the updates.
    """
    plan = json.loads(answer(6, "--json"))
    step = computing(7e9, 4 * 1024, RTX_3060)
    hosted = sum(place == "host" for place, _ in plan["placements"])
    update = hosted / 32 * 7e9 / 1.2e9
    assert (hosted, plan["busy"]["host"]) == (26, about(update))
    assert step < plan["bound"] < plan["step"] < 8 / 6 * step + update
    assert 8 * 7e9 * hosted / 32 < plan["host_bytes"] < 56 * 2**30 and plan["peak"] < 12e9
    assert plan["peak"] > 8 * 7e9 * (32 - hosted) / 32


def test_the_page_has_six_commands_and_their_answers() -> None:
    assert len(COMMANDS) == 6 and len(BLOCKS) == 12
    assert all(words[:2] == ["isles", "plan"] for words in COMMANDS)


@pytest.mark.long(cases=6)
@pytest.mark.parametrize("question", range(1, 7))
def test_the_answers_are_those_of_the_page(question: int, answer: Say) -> None:
    """Every line of them, in its order."""
    out = [" ".join(line.split()) for line in answer(question).splitlines()]
    said = [" ".join(line.split()) for line in BLOCKS[2 * question - 1].splitlines() if line]
    places = [next((at for at, line in enumerate(out) if line == one), one) for one in said]
    assert all(isinstance(at, int) for at in places), places
    rows = [at for at, line in zip(places, said, strict=True) if not line.startswith("note:")]
    assert rows == sorted(rows)


@pytest.mark.long
def test_the_first_answer_is_a_run(answer: Say, tmp_path: Path) -> None:
    """run.toml of --out: in a dry run it fits as it was planned."""
    row = row_of(answer(1, "--method", "noloco", "--json", "--out", str(tmp_path)), "codec = int8, anchor_codec = int8")
    plan = plan_run(read_config(str(tmp_path / "run.toml"), {}, []), machine="H100")
    assert plan.fit is not None and plan.fit.fits and plan.fit.device_bytes == row["device_bytes"]
    assert plan.fullest.memory.peak == row["memory_bytes"]
