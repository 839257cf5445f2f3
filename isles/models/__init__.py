"""Models: a Llama-style decoder, its named sizes, and the FLOPs of one token.

`ModelConfig` and the counts of `sizes` are importable without torch; the names below load on first use.

`config`    the `[model]` section; `factory`: builds its model; `model_limits`: the model's limits, before it is built
`decoder`   Isles' own model; `hf`: import from and export to transformers; `sizes`: named shapes
`blocks`    a model's blocks; `cuts`: the places where a model is cut into stages; `stages`: the stages
`subnet`    narrower models from some of a model's units; `subspace`: a residual stream in a subspace
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from isles.base.imports import on_first_use

if TYPE_CHECKING:
    from isles.base.marks import documents_of, ids_of, targets_of
    from isles.models.config import ModelConfig
    from isles.models.decoder import Decoder, Output, next_token_loss, output_of
    from isles.models.factory import autocast, build, choose_device, sketch
    from isles.models.model_limits import limits
    from isles.models.sizes import SIZES, Shape, flops_per_token, non_embedding_parameters, parameters, shape_of

__all__, __getattr__, __dir__ = on_first_use(__name__)
