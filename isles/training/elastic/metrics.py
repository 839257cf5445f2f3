"""The summary's entries of elastic runs, from the run's records."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from isles.base.schema import ElasticSummary
from isles.data.order import rows
from isles.membership.coordinator import RoundsCoordinator
from isles.membership.data_ledger import batches, count_steps
from isles.membership.messages import View, from_plain
from isles.membership.run_log import (
    EXCHANGES,
    JOURNAL,
    RoundRecord,
    StartRecord,
    goodput,
    ledger,
    read_history,
    read_record,
    steps_in_model,
)
from isles.training.config.reading import tokens_a_step
from isles.training.config.sections import Config
from isles.training.records.rundir import METRICS, read_lines
from isles.training.records.summary import SummaryTable, of_everybody, parallel_bytes, summarise


def elastic_summary(
    config: Config,
    out: Path,
    results: Mapping[int, Mapping[str, Any]],
    membership: RoundsCoordinator,
    members: Collection[int],
    wall: float,
    computed: float | None = None,
) -> SummaryTable:
    """The summary of the run in `out`. results: by member. membership: at the end. members: that the model is made of.
    computed: compute seconds of all workers; None: those of the reported rounds.
    """
    journal, records = recorded(out)
    summary = summarise(config, of_everybody(results, members, read_lines(out / METRICS)), wall)
    done, counted = ledger(records), steps_in_model(records, members)
    seconds = done.seconds if computed is None else computed
    there = read_history(journal, records, membership.rules.sync_every)
    last = membership.last or 0
    elastic = ElasticSummary(
        goodput=goodput(counted, done, there),
        work_lost=max(1 - counted * done.seconds / done.steps / seconds, 0.0) if done.steps and seconds else 0.0,
        rounds=done.rounds,
        rounds_alone=done.alone,
        rounds_again=there.counts["retry"],
        outcomes=dict(done.outcomes),
        rounds_unassigned=done.out_of_turn,
        inner_steps=done.steps,
        inner_steps_counted=counted,
        inner_steps_backlog=count_steps(membership.ledger.outstanding(last + 1, membership.members())),
        inner_steps_repeated=repeated(journal, records),
        joins=there.counts["join"],
        losses=there.counts["lost"],
        steps_lost=sum(reached - step for reached, step in there.again),
        leaves=there.counts["leave"],
        views=there.counts["view"],
        outages=len(there.outages),
        state_transfers=done.transfers,
        state_transfer_bytes=done.size,
    )
    usual = max(round(done.steps / config.run.steps), 1)  # members at once
    ddp = parallel_bytes(summary["parameters"], usual, config.run.steps) * usual / summary["workers"]
    tokens = done.steps * tokens_a_step(config, 1)
    return summary | {"tokens": tokens, "ddp_bytes_per_worker": ddp} | elastic.record()


def views_of(journal: Iterable[Mapping[str, Any]]) -> dict[int, View]:
    """The views that `journal` holds, by number."""
    views = (from_plain(entry["view"]) for entry in journal if entry["event"] == "view")
    return {view.number: view for view in views}


def repeated(journal: Iterable[Mapping[str, Any]], records: Iterable[RoundRecord | StartRecord]) -> int:
    """Inner steps whose batch was read before, as far as both were reported."""
    views = views_of(journal)
    read, count = set[int](), 0
    for record in records:
        view = views.get(record.view) if isinstance(record, RoundRecord) else None
        index = None if view is None else view.index(record.member)
        if isinstance(record, RoundRecord) and view is not None and index is not None:
            samples = {int(rows(*one, batch_size=1)[0]) for one in batches(views, view, record.round, index)}
            count += len(samples & read)
            read |= samples
    return count


def recorded(out: Path) -> tuple[list[dict[str, Any]], list[RoundRecord | StartRecord]]:
    """(the journal's entries, the lines of its exchanges) of the run in `out`; a last line that was not written whole
    is left out. ValueError for any other that is none.
    """
    records = [read_record(record) for record in read_lines(out / EXCHANGES)]
    once = {replace(record, at=0.0): record for record in records}  # a lighthouse may die before it acknowledges one
    return [dict(entry) for entry in read_lines(out / JOURNAL)], [*once.values()]
