"""The `[data]` section: which text, which tokenizer, and how sequences are dealt to the workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Split = Literal["iid", "by_file"]
BatchMode = Literal["per_worker", "global"]
IdsType = Literal["uint16", "uint32", "int64"]

PREPARING = "preparing data"  # how lines of progress begin
IDS = "ids"  # instead of a tokenizer: the files hold token ids


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What is read and how it is dealt out. Every impossible value raises a ValueError of one line."""

    path: str = ""
    """Text file, JSONL, Parquet, saved Hugging Face dataset, MosaicML's MDS, a folder of such files, or a folder that
    holds a stored corpus, which has its own split; "" means the source of the running Python's standard library.
    """
    source: str = ""
    """A class of your own for the documents of `path`, "package.module:Class" (docs/data.md); "": files."""
    validation_path: str = ""
    """Validation text, in these formats; "": a share of `path`, or the split "validation", "val" or "test"."""
    tokenizer: str = "bytes"
    """What makes ids of text: "bytes" (one id a byte), or the path of a Hugging Face `tokenizer.json` or of the folder
    that holds one; left out beside model.hf: that folder's. "ids": the files hold token ids (.bin, .npy, rows of ids).
    """
    vocab: int = 0
    """With tokenizer = "ids": how many ids there are."""
    ids_dtype: IdsType = "uint16"
    """With tokenizer = "ids": the numbers in .bin files and in MDS columns of bytes, "uint16", "uint32" or "int64"."""
    text_key: str = ""
    """The column of JSONL, Parquet and dataset rows; "": "text", or "input_ids" with tokenizer = "ids"."""
    split: Split = "iid"
    """Who reads what: "iid" deals one shuffled sequence of windows to the workers in turn; "by_file" gives each worker
    documents of its own (neighbours in path order, so the workers' texts differ).
    """
    batch_mode: BatchMode = "per_worker"
    """Whether `batch_size` counts the sequences of one worker or of all workers together."""
    batch_size: int = 16
    """Sequences a step."""
    validation_fraction: float = 0.05
    """Share of the tokens kept out of training, in [0, 1); 0 means no validation. Left out beside `validation_path`."""
    validation_sequences: int = 128
    """Sequences that one validation pass reads, evenly spaced over the validation tokens."""
    cache: str = "auto"
    """Folder in which one process stores the tokenised text, which all others memory-map; "auto": `corpora` below
    ~/.local/state/isles ($ISLES_HOME), but nothing for up to 32 MB read as bytes; "": each process prepares its own.
    """

    def __post_init__(self) -> None:
        for key in ("path", "source", "validation_path", "tokenizer", "text_key", "cache"):
            if not isinstance(value := getattr(self, key), str):
                raise ValueError(f"data.{key} = {value!r} is not a string; put it in quotes")
        if not self.tokenizer:
            raise ValueError('data.tokenizer is empty; use "bytes" or the path of a tokenizer.json')
        if type(self.vocab) is not int or self.vocab < (self.tokenizer == IDS):
            raise ValueError(f'data.vocab = {self.vocab!r}; with data.tokenizer = "ids", give how many ids there are')
        if self.tokenizer != IDS and (self.vocab, self.ids_dtype) != (0, "uint16"):
            raise ValueError('data.vocab and data.ids_dtype go with data.tokenizer = "ids"; set it, or leave them out')
        for key, kind in (("split", Split), ("batch_mode", BatchMode), ("ids_dtype", IdsType)):
            if (value := getattr(self, key)) not in get_args(kind):
                known = " or ".join(map(repr, get_args(kind)))
                raise ValueError(f"data.{key} = {value!r} is not known; use {known}")
        for key in ("batch_size", "validation_sequences"):
            if type(value := getattr(self, key)) is not int or value < 1:
                raise ValueError(f"data.{key} = {value!r} is not a number of sequences; use an integer of at least 1")
        fraction = self.validation_fraction
        if not isinstance(fraction, (int, float)) or isinstance(fraction, bool) or not 0 <= fraction < 1:
            raise ValueError(f"data.validation_fraction = {fraction!r} is not in [0, 1); use for example 0.05")
        if self.validation_path and fraction != type(self).validation_fraction:
            raise ValueError(f"data.validation_fraction = {fraction!r} beside data.validation_path; leave one out")

    @property
    def column(self) -> str:
        """The name of the column that is read."""
        return self.text_key or ("input_ids" if self.tokenizer == IDS else "text")

    def batch_size_per_worker(self, workers: int) -> int:
        """Sequences that each of `workers` reads a step; ValueError where a global batch does not divide."""
        if self.batch_mode == "per_worker":
            return self.batch_size
        if self.batch_size % workers:
            nearest = max(1, round(self.batch_size / workers)) * workers
            raise ValueError(
                f'data.batch_size = {self.batch_size} is the batch of all workers (data.batch_mode = "global") and '
                f"does not divide by {workers} workers; use {nearest}"
            )
        return self.batch_size // workers
