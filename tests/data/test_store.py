"""The store of tokenised text: the ids of whole documents, whatever is cut, stopped, damaged or done by several."""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import os
import queue
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isles.data import Corpus, DataConfig, load_corpus, load_tokenizer, prepare, sources
from isles.data.tokenizer import HuggingFaceTokenizer, Ids


def text_of(draw: random.Random, lines: int) -> str:
    """Lines of words; some are blank, indented, long, end in a carriage return, or are but spaces."""
    words = ["a", "the", "of", "réel", "東京", "x=1;", "(y)", "...", "I'll", "", "dońt", "12345", "<end>", "😀", "aaa"]
    ends = ["\n"] * 6 + ["\n\n", "\r\n", "\n    ", "\n\n\n\t", " \n", "\n" * 40, " " * 90 + "\n" + " " * 90]
    one = [" ".join(draw.choices(words, k=draw.randrange(1, 14))) + draw.choice(ends) for _ in range(lines)]
    return "".join(one) + draw.choice(["", "\n", "end"])


def _byte_level(prefix: bool) -> Callable[[Any], None]:
    def set_up(made: Any) -> None:
        from tokenizers import pre_tokenizers

        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)

    return set_up


def _as_llama_3(made: Any) -> None:
    from tokenizers import Regex, pre_tokenizers

    words = r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    split = pre_tokenizers.Split(Regex(words), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])


def _prefixed(made: Any) -> None:
    from tokenizers import pre_tokenizers

    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)


KINDS: dict[str, Callable[[Any], None]] = {
    "as GPT-2": _byte_level(False),
    "as Llama 3": _as_llama_3,
    "with a space in front": _byte_level(True),
    "few cuts are exact": _prefixed,  # as Llama 2: a mark is put before each text
    "ids over line ends": lambda made: None,  # no pre-tokenizer: merges over line ends
}


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tokenizers import Tokenizer, models, trainers

    made = Tokenizer(models.BPE())
    KINDS[request.param](made)
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=["<end>"], show_progress=False)
    made.train_from_iterator([text_of(random.Random(0), 200)], trainer)
    folder = tmp_path_factory.mktemp("tokenizer")
    made.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short pieces, batches and reads, and a place saved after every batch."""
    values = {"_BATCH_CHARACTERS": 900, "_PIECE_CHARACTERS": 300, "_AROUND": 60, "_BLANK": 16, "_SAVED": -1.0}
    for name, value in values.items():
        monkeypatch.setattr(prepare, name, value)
    monkeypatch.setattr(sources, "_CHUNK", 700)


def write(root: Path, texts: Sequence[str]) -> Path:
    root.mkdir(exist_ok=True)
    for number, text in enumerate(texts):
        (root / f"{number}.txt").write_text(text, encoding="utf-8", newline="")
    return root


def expected(root: Path, tokenizer: Path | None) -> str:
    """sha256 of the corpus of the folder's files with the last tenth of each in validation: whole texts are encoded."""
    made = load_tokenizer(str(tokenizer or "bytes"))
    parts: list[list[Ids]] = [[], []]
    for file in sorted(root.iterdir()):
        text = file.read_bytes().decode()
        ids = made.encode(text if text.endswith("\n") or made.eos_id is not None else text + "\n")
        ids = ids if made.eos_id is None else np.append(ids, ids.dtype.type(made.eos_id))
        at = len(ids) - -(-len(ids) // 10)
        parts[0].append(ids[:at])
        parts[1].append(ids[at:])
    digest = hashlib.sha256()
    for part in parts:
        bounds = np.cumsum([0, *map(len, part)], dtype=np.int64)
        tokens = np.concatenate(part)
        for array in (bounds, tokens):
            digest.update(f"{array.dtype.name} {len(array)}\n".encode() + array.tobytes())
    return digest.hexdigest()


def load(root: Path, tokenizer: Path | None, cache: Path, **more: Any) -> Corpus:
    prepare._corpora.clear()  # as in a process that starts
    config = DataConfig(path=str(root), tokenizer=str(tokenizer or "bytes"), validation_fraction=0.1, cache=str(cache))
    corpus = load_corpus(config, **more)
    assert corpus.split_by == "position"
    return corpus


@pytest.mark.usefixtures("small")
def test_pieces_give_the_ids_of_whole_documents(tokenizer: Path, tmp_path: Path) -> None:
    for seed in range(4):
        draw = random.Random(seed)
        root = write(tmp_path / f"text {seed}", [text_of(draw, 150), text_of(draw, 3), "x" * 3000, text_of(draw, 60)])
        if seed % 2:
            (tokenizer / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
        assert load(root, tokenizer, tmp_path / "cache").sha256 == expected(root, tokenizer), seed
        (tokenizer / "tokenizer_config.json").unlink(missing_ok=True)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("tokenizer", [kind for kind in KINDS if "space" not in kind], indirect=True)
def test_long_documents_are_cut_where_a_cut_is_exact(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    longest, encode = [0], HuggingFaceTokenizer.encode_batch

    def measured(self: HuggingFaceTokenizer, texts: Sequence[str]) -> list[Ids]:
        longest[0] = max(longest[0], *map(len, texts))
        return encode(self, texts)

    root = write(tmp_path / "text", [text_of(random.Random(1), 1000)])
    monkeypatch.setattr(HuggingFaceTokenizer, "encode_batch", measured)
    load(root, tokenizer, tmp_path / "cache")
    assert (longest[0] > 3000) == ("few cuts" in request.node.name), longest


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("tokenizer", ["as GPT-2", "ids over line ends"], indirect=True)
@pytest.mark.parametrize("spoilt", ["", "ids", "documents", "place.json"])
def test_what_was_stopped_goes_on(
    spoilt: str, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After any batch, with no text encoded again; a spoilt draft begins anew."""
    batches, encoded, places = prepare._batches, [0], list[float]()
    stop = -1

    def stopping(pieces: Iterator[Any]) -> Iterator[Any]:
        for number, batch in enumerate(batches(pieces)):
            if number == stop:
                raise KeyboardInterrupt
            encoded[0] += sum(len(piece.text) for piece in batch)
            places.append(batch[-1].done)
            yield batch

    draw = random.Random(2)
    root = write(tmp_path / "text", [text_of(draw, 30), text_of(draw, 120), text_of(draw, 2), text_of(draw, 30)])
    size = sum(len(file.read_bytes().decode()) for file in root.iterdir())
    right, cache = expected(root, tokenizer), tmp_path / "cache"
    monkeypatch.setattr(prepare, "_batches", stopping)
    for after in (2, 5):
        stop, encoded[0] = after, 0
        places.clear()
        with pytest.raises(KeyboardInterrupt):
            load(root, tokenizer, cache)
        before = encoded[0]
        stop, encoded[0] = -1, 0
        (part,) = cache.iterdir()
        for name in ("train-bounds", "validation-file_of", "train-tokens", "train-sums"):
            (part / f"{name}.npy").write_bytes(b"of a process that was killed while it wrote this")
        if spoilt:
            data = bytearray((part / spoilt).read_bytes())
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(3)
            (part / spoilt).write_bytes(data)
        assert load(root, tokenizer, cache).sha256 == right
        assert spoilt or places == sorted(places)  # what is shown goes on, too
        assert encoded[0] == size - (0 if spoilt else before) > 0
        (folder,) = cache.iterdir()
        assert not {"ids", "documents", "place.json", "lock"} & {file.name for file in folder.iterdir()}
        shutil.rmtree(folder)


@pytest.mark.usefixtures("small")
def test_a_text_that_changed_in_silence_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same size and time; in the middle, or when `check` reads it again."""
    root, cache = write(tmp_path / "text", [text_of(random.Random(3), 200), "a\n" * 20]), tmp_path / "cache"
    stat, batches = (root / "0.txt").stat(), prepare._batches

    def _stop() -> Iterator[Any]:
        raise KeyboardInterrupt
        yield

    def change() -> None:
        data = bytearray((root / "0.txt").read_bytes())
        data[5] = ord("X") if data[5] != ord("X") else ord("Y")
        (root / "0.txt").write_bytes(data)
        os.utime(root / "0.txt", ns=(stat.st_atime_ns, stat.st_mtime_ns))

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(prepare, "_batches", lambda pieces: chain([next(batches(pieces))], _stop()))
        load(root, None, cache)
    change()
    first = load(root, None, cache).sha256
    assert first == expected(root, None)
    change()
    notes: list[str] = []
    assert load(root, None, cache).sha256 == first  # nobody looked
    assert load(root, None, cache, check=True, notify=notes.append).sha256 == expected(root, None) != first
    assert notes == ["the text has changed since it was prepared: preparing it anew"]
    assert load(root, None, cache, check=True, notify=notes.append).sha256 == expected(root, None)
    assert len(notes) == 1


def _prepare(root: Path, tokenizer: Path, cache: Path, delay: float, begun: Any, done: Any) -> None:
    """In a process of its own: report every batch, with a pause after it; then the digest."""
    batches = prepare._batches

    def slow(pieces: Iterator[Any]) -> Iterator[Any]:
        for batch in batches(pieces):
            yield batch
            begun.put(sum(len(piece.text) for piece in batch))
            time.sleep(delay)

    prepare._batches = slow  # type: ignore[assignment]
    done.put((os.getpid(), load(root, tokenizer, cache).sha256))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("tokenizer", ["as GPT-2"], indirect=True)
def test_one_process_prepares_and_the_next_goes_on_if_it_is_killed(tokenizer: Path, tmp_path: Path) -> None:
    root, cache = write(tmp_path / "text", [text_of(random.Random(4), 200)]), tmp_path / "cache"
    right, size = expected(root, tokenizer), len((root / "0.txt").read_bytes().decode())
    context = multiprocessing.get_context("fork")
    begun, done = context.Queue(), context.Queue()
    first = context.Process(target=_prepare, args=(root, tokenizer, cache, 30.0, begun, done))
    first.start()
    before = begun.get(timeout=60)
    others = [context.Process(target=_prepare, args=(root, tokenizer, cache, 0.0, begun, done)) for _ in range(3)]
    for process in others:
        process.start()
    with pytest.raises(queue.Empty):
        begun.get(timeout=0.5)  # they wait
    assert done.empty()
    os.kill(first.pid, signal.SIGKILL)  # type: ignore[arg-type]
    found = dict(done.get(timeout=60) for _ in others)
    assert set(found) == {process.pid for process in others} and set(found.values()) == {right}
    for process in (first, *others):
        process.join(timeout=60)
    encoded = before
    while not begun.empty():
        encoded += begun.get(timeout=60)
    assert size <= encoded <= size + before  # the killed one's last batch may not have been saved


def _peak(root: Path, tokenizer: Path, cache: Path) -> int:
    """Bytes of memory of its own that a process adds while it prepares the folder."""
    context = multiprocessing.get_context("fork")
    ready, go = context.Event(), context.Event()

    def work() -> None:
        load_tokenizer(str(tokenizer))
        ready.set()
        go.wait(60)
        load(root, tokenizer, cache)

    process = context.Process(target=work)
    process.start()
    assert ready.wait(60)

    def own() -> int:
        with contextlib.suppress(OSError, IndexError):
            status = Path(f"/proc/{process.pid}/status").read_text()
            return 1024 * int(status.split("RssAnon:")[1].split()[0])
        return 0

    before = peak = own()
    go.set()
    while process.is_alive():
        peak = max(peak, own())
        process.join(0.01)
    assert process.exitcode == 0 and before
    return peak - before


def _text(size: int) -> str:
    part = "".join(text_of(random.Random(seed), 300) for seed in range(20))
    return part * (size // len(part) + 1)


@pytest.mark.parametrize("tokenizer", ["as GPT-2"], indirect=True)
def test_memory_does_not_depend_on_the_size(tokenizer: Path, tmp_path: Path) -> None:
    """One document of 1.2 and one of 2.4 MB; encoded whole, each MB more takes 100 MB more."""
    peaks = []
    for size in (1_200_000, 2_400_000):
        root = write(tmp_path / str(size), [_text(size)])
        peaks.append(_peak(root, tokenizer, tmp_path / "cache"))
    assert peaks[1] - peaks[0] < 50e6, peaks
