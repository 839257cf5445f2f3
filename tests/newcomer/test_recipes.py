"""docs/recipes.md runs as printed. Where a trainer takes the batches in the rows' order, the model is that of a plain
loop, to the bit.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from tests.newcomer.folder import write_folder
from tests.newcomer.page import PAGE, ROOT, SCRIPTS, call, commands

RECIPES = {  # (heading, library it needs)
    "train_trainer.py": ("transformers' Trainer", "transformers"),
    "train_accelerate.py": ("accelerate", "accelerate"),
    "train_lightning.py": ("Lightning", "lightning"),
    "train_fabric.py": ("Fabric", "lightning"),
    "train_lora.py": ("LoRA with PEFT", "peft"),
}
PLAIN = """
import torch

import isles
import parts

world = isles.init()
model = parts.load_model()
method = isles.DiLoCo(model, torch.optim.AdamW(model.parameters(), lr=3e-3), world.outer, sync_every=10)
rows = [row["input_ids"] for row in parts.load_rows(world.rank, world.size)]
for at in range(0, 320, 8):
    ids = torch.stack(rows[at : at + 8])
    model(input_ids=ids, labels=ids).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    method.step()
    method.zero_grad()
model = method.consolidate()
if world.rank == 0:
    model.save_pretrained("out/plain")
world.close()
"""


def test_each_recipe_is_tested() -> None:
    """Scripts are Python, are started by a command of their section, and stand on this page alone."""
    assert SCRIPTS.keys() == RECIPES.keys() | {"parts.py"} and PAGE.count("```python\n") == len(SCRIPTS)
    for name, (heading, _) in RECIPES.items():
        ast.parse(SCRIPTS[name])
        assert commands(heading) == [f"torchrun --nproc-per-node 2 --virtual-local-rank {name}"]
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "recipes.md" or not re.search(
            r"os\.environ\.pop|setup_dataloaders|LoraConfig", page.read_text()
        )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers", reason="needs the extra hf")
    made = write_folder(tmp_path_factory.mktemp("recipes"))
    for name, script in {**SCRIPTS, "plain.py": PLAIN}.items():
        (made / name).write_text(script)
    call("torchrun --nproc-per-node 2 plain.py", made)
    return made


@pytest.mark.long(cases=len(RECIPES))
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_runs_as_printed(folder: Path, name: str) -> None:
    heading, library = RECIPES[name]
    pytest.importorskip(library)
    (command,) = commands(heading)
    printed, out = call(command, folder), folder / "out"
    if name == "train_lora.py":
        check_lora(out / "lora", printed)
    elif name == "train_trainer.py":  # which shuffles
        assert loss(out / "trainer") == pytest.approx(loss(out / "plain"), abs=0.15)
    else:
        own, plain = (out / one / "model.safetensors" for one in (name[6:-3], "plain"))
        assert own.read_bytes() == plain.read_bytes()


def loss(folder: Path, adapters: Path | None = None) -> float:
    """Of the saved model on the first text, in nats a token; adapters: put into a fresh model. Below what it was."""
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    home = folder.parents[1]
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(home / "models" / "my-llama"))
    text = json.loads((home / "my-text.jsonl").read_text().partition("\n")[0])["text"]
    ids = torch.tensor(Tokenizer.from_file(str(home / "models" / "my-llama" / "tokenizer.json")).encode(text).ids)
    ids = ids[: len(ids) // 64 * 64].view(-1, 64)
    before = float(model(input_ids=ids, labels=ids).loss.detach())
    if adapters is None:
        model = AutoModelForCausalLM.from_pretrained(folder)
    else:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapters)
    after = float(model(input_ids=ids, labels=ids).loss.detach())
    assert after < before - (0.02 if adapters else 0.5), (before, after)
    return after


def check_lora(folder: Path, printed: str) -> None:
    """Rank 4 of two 32 x 32 matrices in each of two layers; a mean of two workers' changes in each of four rounds."""
    found = re.fullmatch(r"(\d+) entries trained, (\d+) bytes sent in rounds\n", printed)
    assert found and int(found[1]) == 2 * 2 * 4 * (32 + 32)
    whole = 4 * 4 * int(found[1])
    assert whole <= int(found[2]) <= 1.02 * whole  # and headers
    loss(folder, adapters=folder)
