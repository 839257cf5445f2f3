import json
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isles.data import Corpus, DataConfig, Loader, load_corpus
from isles.data.loader import document_shares, resharded
from isles.data.order import epoch_order

CONTEXT = 24
PLAIN = DataConfig()


def loaders(corpus: Corpus, workers: int, *, seed: int = 0, context: int = CONTEXT, **values) -> list[Loader]:
    config = DataConfig(**values)
    return [Loader(corpus, config, context=context, worker=w, workers=workers, seed=seed) for w in range(workers)]


def rows(batch: torch.Tensor) -> list[bytes]:
    return [bytes(row) for row in batch.tolist()]


def one_epoch(loader: Loader, sequences: int) -> list[bytes]:
    """The first `sequences` sequences of one worker."""
    taken: list[bytes] = []
    while len(taken) < sequences:
        taken += rows(next(loader))
    return taken[:sequences]


def test_batches_are_windows_of_the_training_tokens(stories: Corpus) -> None:
    (loader,) = loaders(stories, 1, batch_size=5)
    batch = next(loader)
    assert batch.dtype == torch.int64
    assert batch.shape == (5, CONTEXT + 1)
    text = stories.train.tokens.tobytes()
    assert loader.sequences == (len(text) - 1) // CONTEXT
    starts = sorted(text.index(row) for row in one_epoch(loaders(stories, 1, batch_size=5)[0], loader.sequences))
    assert starts == [i * CONTEXT for i in range(loader.sequences)]  # each once, sharing only the boundary token


def test_same_seed_same_batches_and_another_seed_others(stories: Corpus) -> None:
    def first(seed: int) -> list[torch.Tensor]:
        return list(islice(loaders(stories, 1, seed=seed, batch_size=4)[0], 50))

    assert torch.equal(torch.stack(first(3)), torch.stack(first(3)))
    assert not torch.equal(torch.stack(first(3)), torch.stack(first(4)))


def test_epochs_are_permuted_anew(stories: Corpus) -> None:
    (loader,) = loaders(stories, 1, batch_size=1)
    first, second = one_epoch(loader, loader.sequences), one_epoch(loader, loader.sequences)
    assert first != second
    assert sorted(first) == sorted(second)


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_iid_workers_are_disjoint_and_cover_the_epoch(stories: Corpus, workers: int) -> None:
    group = loaders(stories, workers, batch_size=1)
    count = group[0].sequences
    whole, extra = divmod(count, workers)
    taken = [one_epoch(loader, whole + (loader.worker < extra)) for loader in group]
    everything = [row for rows_of_one in taken for row in rows_of_one]
    assert len(everything) == len(set(everything)) == count


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_by_file_workers_never_meet(stories: Corpus, workers: int) -> None:
    group = loaders(stories, workers, batch_size=3, split="by_file")
    seen = [set(one_epoch(loader, 3 * loader.sequences)) for loader in group]  # three epochs: shares stay
    assert [len(rows_of_one) for rows_of_one in seen] == [loader.sequences for loader in group]
    assert len(set.union(*seen)) == sum(map(len, seen))
    # A line begins with its document's number, and no document has two owners.
    text = stories.train.tokens.tobytes()
    owners: dict[int, set[int]] = {}
    for worker, rows_of_one in enumerate(seen):
        for row in rows_of_one:
            start = text.index(row)
            first, last = np.searchsorted(stories.train.bounds, [start, start + CONTEXT], side="right") - 1
            for document in range(first, last + 1):
                owners.setdefault(document, set()).add(worker)
    assert all(len(owner) == 1 for owner in owners.values())


@given(st.integers(1, 4), st.integers(1, 5), st.integers(0, 5), st.integers(4, 200))
@settings(max_examples=25, deadline=None)
def test_union_is_the_batch_of_one_worker(
    stories: Corpus, workers: int, batch_size: int, seed: int, context: int
) -> None:
    group = loaders(stories, workers, batch_size=batch_size, seed=seed, context=context)
    (alone,) = loaders(stories, 1, batch_size=batch_size * workers, seed=seed, context=context)
    for _ in range(2 * alone.sequences // (batch_size * workers) + 2):  # over two epochs
        together = torch.stack([next(loader) for loader in group], dim=1).flatten(0, 1)
        assert torch.equal(together, next(alone))


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_global_batch_is_the_same_for_any_number_of_workers(stories: Corpus, workers: int) -> None:
    group = loaders(stories, workers, batch_size=8, batch_mode="global")
    (alone,) = loaders(stories, 1, batch_size=8)
    assert group[0].batch_size == 8 // workers
    for _ in range(30):
        together = torch.stack([next(loader) for loader in group], dim=1).flatten(0, 1)
        assert torch.equal(together, next(alone))


def test_a_batch_larger_than_the_epoch_reads_each_sequence_equally_often(stories: Corpus) -> None:
    count = loaders(stories, 1, context=500)[0].sequences
    (loader,) = loaders(stories, 1, context=500, batch_size=3 * count)
    batch = rows(next(loader))
    assert {batch.count(row) for row in batch} == {3}


def test_by_file_with_one_worker_is_iid(stories: Corpus) -> None:
    (shared,), (own,) = loaders(stories, 1), loaders(stories, 1, split="by_file")
    for _ in range(20):
        assert torch.equal(next(shared), next(own))


@pytest.mark.parametrize("split", ["iid", "by_file"])
def test_resume_is_exact_at_every_step_across_epochs(stories: Corpus, split: str) -> None:
    def second_of_three() -> Loader:
        return loaders(stories, 3, batch_size=4, split=split, context=100)[1]

    loader = second_of_three()
    steps = 3 * loader.sequences // 4 + 3
    states, batches = [], []
    for _ in range(steps):
        states.append(json.loads(json.dumps(loader.state_dict())))
        batches.append(next(loader))
    assert states[-1]["consumed"] > loader.sequences
    for step, state in enumerate(states):
        resumed = second_of_three()
        resumed.load_state_dict(state)
        for expected in batches[step : step + 3]:
            assert torch.equal(next(resumed), expected)


def test_state_is_the_same_for_every_worker_and_can_go_back(stories: Corpus) -> None:
    group = loaders(stories, 3, batch_size=2)
    start = group[0].state_dict()
    first = [next(loader) for loader in group]
    assert group[0].state_dict() == group[2].state_dict()
    group[1].load_state_dict(start)
    assert torch.equal(next(group[1]), first[1])


def test_foreign_states_are_refused(stories: Corpus) -> None:
    (loader,) = loaders(stories, 1, batch_size=4)
    state = loader.state_dict()
    for change, match in [
        ({"corpus_sha256": "0"}, "corpus_sha256 = '0' but this run has .*; resume with the same one$"),
        ({"seed": 1}, "seed = 1 but this run has 0; resume"),
        ({"context": 7}, "context = 7 but this run has 24; resume"),
        ({"split": "by_file"}, "split = 'by_file' but this run has 'iid'; resume"),
        ({"workers": 2}, "workers = 2 but this run has 1; resume with the same one$"),
        ({"batch_size": 2}, "batch_size = 2 but this run has 4; resume with the same one$"),
        ({"consumed": -1}, "consumed = -1; it must be"),
        ({"consumed": 1.5}, "consumed = 1.5; it must be"),
        ({"other": 1}, "does not have the keys"),
    ]:
        with pytest.raises(ValueError, match=f"^the loader state .*{match}") as caught:
            loader.load_state_dict(state | change)
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=r"^the loader state does not have the keys"):
        loader.load_state_dict({})
    with pytest.raises(ValueError, match="seed = 1"):
        loader.load_state_dict(resharded(state, workers=1, batch_size=4) | {"seed": 1})
    assert loader.state_dict() == state


def test_resharding_still_reads_every_sequence_once(stories: Corpus) -> None:
    before = loaders(stories, 2, batch_size=3)
    taken = [row for _ in range(5) for loader in before for row in rows(next(loader))]
    after = loaders(stories, 3, batch_size=1)
    for loader in after:
        loader.load_state_dict(resharded(before[0].state_dict(), workers=3, batch_size=1))
    while len(taken) + 3 <= after[0].sequences:
        taken += [row for loader in after for row in rows(next(loader))]
    assert len(set(taken)) == len(taken) > after[0].sequences - 3


def test_validation_is_the_same_for_every_worker(stories: Corpus) -> None:
    values = {"batch_size": 4, "validation_sequences": 10}
    one = list(loaders(stories, 1, **values)[0].validation_batches())
    assert [len(batch) for batch in one] == [4, 4, 2]
    assert one[0].shape == (4, CONTEXT + 1)
    assert one[0].dtype == torch.int64
    for loader in loaders(stories, 3, seed=5, split="by_file", **values):
        next(loader)
        for _ in range(2):
            assert all(torch.equal(a, b) for a, b in zip(one, loader.validation_batches(), strict=True))
    text = stories.validation.tokens.tobytes()
    starts = [text.index(row) for batch in one for row in rows(batch)]
    assert starts == sorted(starts)
    assert starts[-1] > len(text) * 0.8  # spread over all of it
    whole = [
        row for batch in loaders(stories, 1, validation_sequences=10**6)[0].validation_batches() for row in rows(batch)
    ]
    assert len(whole) == len(set(whole)) == (len(text) - 1) // CONTEXT


def test_no_validation_sequence_is_a_training_sequence(stories: Corpus) -> None:
    (loader,) = loaders(stories, 1, validation_sequences=10**6)
    train = stories.train.tokens.tobytes()
    for batch in loader.validation_batches():
        for row in rows(batch):
            assert row not in train


def test_impossible_loaders(stories: Corpus) -> None:
    def refuses(match: str, corpus: Corpus = stories, config: DataConfig = PLAIN, **values) -> None:
        with pytest.raises(ValueError, match=match) as caught:
            Loader(corpus, config, **({"context": CONTEXT} | values))
        assert "\n" not in str(caught.value)
        assert ";" in str(caught.value)

    refuses("^context = 0 ", context=0)
    refuses("^worker = 2 is not one of 2 workers; use 0 to 1$", worker=2, workers=2)
    refuses("^worker = 0 is not one of 0 workers", workers=0)
    refuses("^seed = -1 ", seed=-1)
    refuses(r"^data\.batch_size = 16 .* 3 workers; use 15$", config=DataConfig(batch_mode="global"), workers=3)
    refuses(r"^data\.path: training has \d+ tokens, fewer than context \+ 1 = 100001; give", context=100_000)
    by_file = DataConfig(split="by_file")
    refuses(r'^data\.split = "by_file" cannot share \d+ documents among 100 workers; use', config=by_file, workers=100)
    refuses(r"^data\.path: the share of worker 0 in training has \d+ tokens", config=by_file, workers=4, context=2400)
    refuses(r"^data\.validation_fraction gives \d+ tokens for validation, fewer than .*; raise", context=2400)
    without = load_corpus(DataConfig(path=stories.name, validation_fraction=0))
    nothing_kept = Loader(without, PLAIN, context=2400)
    with pytest.raises(ValueError, match=r"^data\.validation_fraction = 0 keeps no text for validation; use"):
        next(nothing_kept.validation_batches())


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=60), st.integers(1, 8))
def test_shares_are_disjoint_whole_and_balanced(lengths: list[int], workers: int) -> None:
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    if len(lengths) < workers:
        with pytest.raises(ValueError, match=r"data\.split"):
            document_shares(bounds, workers)
        return
    offsets = document_shares(bounds, workers)
    assert offsets[0] == 0
    assert offsets[-1] == bounds[-1]
    assert set(offsets) <= set(bounds)
    sizes = np.diff(offsets)
    assert sizes.min() > 0
    assert sizes.max() <= bounds[-1] / workers + max(lengths) * workers
    if len(lengths) >= workers and max(lengths) * workers <= bounds[-1]:
        assert sizes.max() <= bounds[-1] / workers + max(lengths)


def test_order_never_changes() -> None:
    """Golden values: the order is a contract between machines and between versions."""
    assert epoch_order(10, seed=0, epoch=0, share=0).tolist() == [0, 8, 9, 3, 7, 5, 1, 2, 6, 4]
    assert epoch_order(10, seed=7, epoch=3, share=2).tolist() == [8, 4, 6, 3, 2, 1, 0, 9, 5, 7]
    assert sorted(epoch_order(1000, seed=1, epoch=1, share=0).tolist()) == list(range(1000))


def test_loaders_share_the_order_and_hold_no_tokens(stories: Corpus) -> None:
    group = loaders(stories, 256, batch_size=1, context=4)
    for loader in group:
        next(loader)
    orders = {id(order) for loader in group for order in loader._orders.values()}
    assert len(orders) <= 2  # at most the epoch's end and the next one's start
    for loader in group:
        assert np.shares_memory(loader._windows, stories.train.tokens)


def test_the_default_corpus_serves_a_loader() -> None:
    corpus = load_corpus(DataConfig())
    loader = Loader(corpus, DataConfig(), context=256, worker=3, workers=4)
    text = corpus.tokenizer.decode(next(loader)[0])
    assert text.encode() in corpus.train.tokens.tobytes()
