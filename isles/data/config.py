"""The `[data]` section: which text, which tokenizer, and how sequences are dealt to the workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from isles.base.imports import import_target

Split = Literal["iid", "by_file"]
Mode = Literal["per_worker", "global"]
IdsType = Literal["uint16", "uint32", "int64"]
Flag = Literal[False, True]

PREPARING = "preparing data"  # how lines of progress begin
IDS = "ids"  # instead of a tokenizer: the files hold token ids


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What is read and how it is dealt out. Every impossible value raises a ValueError of one line."""

    path: Any = ""
    """Text file, JSONL, Parquet, saved dataset, MosaicML's MDS, a folder or address of such files, or a stored corpus,
    which has its own split; "": the running Python's standard library. Or a table of names and paths."""
    source: str = ""
    """A class of your own for the documents of `path`, "package.module:Class" (`isles.DataSource`); "": files."""
    validation_path: Any = ""
    """Validation text, likewise, with a loss for each name; "": a share of each `path`, or a dataset's split."""
    mixture: Any = None
    """Share of the training tokens by name of `path`, scaled to a sum of 1: [data.mixture]; left out: by size."""
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
    documents of its own (neighbours in path order, so the workers' texts differ)."""
    isolate_documents: bool = False
    """Whether a token attends to its own document alone; the first token of a document is then no target."""
    batch_mode: Mode = "per_worker"
    """Whether `batch_size` counts the sequences of one worker or of all workers together."""
    batch_size: int = 16
    """Sequences a step."""
    validation_fraction: float = 0.05
    """Share of the tokens kept out of training, in [0, 1); 0 means no validation. Left out beside `validation_path`."""
    validation_sequences: int = 128
    """Sequences that one validation pass reads, evenly spaced over the validation tokens."""
    cache: str = "auto"
    """Folder in which one process stores the tokenised text, which all others memory-map; "auto": `corpora` below
    ~/.local/state/isles ($ISLES_HOME), but nothing for up to 32 MB read as bytes; "": nothing is stored."""

    def __post_init__(self) -> None:
        import_target("data", "isles.data.parts:check_text")(self)
        if type(self.vocab) is not int or self.vocab < (self.tokenizer == IDS):
            raise ValueError(f'data.vocab = {self.vocab!r}; with data.tokenizer = "ids", give how many ids there are')
        if self.tokenizer != IDS and (self.vocab, self.ids_dtype) != (0, "uint16"):
            raise ValueError('data.vocab and data.ids_dtype go with data.tokenizer = "ids"; set it, or leave them out')
        for key, kind in (("split", Split), ("batch_mode", Mode), ("ids_dtype", IdsType), ("isolate_documents", Flag)):
            if (value := getattr(self, key)) not in get_args(kind):
                known = " or ".join(map(repr, get_args(kind)))
                raise ValueError(f"data.{key} = {value!r} is not known; use {known}")
        for key in ("batch_size", "validation_sequences"):
            if type(value := getattr(self, key)) is not int or value < 1:
                raise ValueError(f"data.{key} = {value!r} is not a number of sequences; use an integer of at least 1")
        fraction = self.validation_fraction
        if not isinstance(fraction, (int, float)) or isinstance(fraction, bool) or not 0 <= fraction < 1:
            raise ValueError(f"data.validation_fraction = {fraction!r} is not in [0, 1); use for example 0.05")

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
