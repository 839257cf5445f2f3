"""Why a row loses what it loses: reasons, without numbers. The page takes those of the rows that are behind."""

WHY = {
    "none": "nobody tells anybody anything, so each worker learns from its own share of the tokens",
    "fsdp": "the mathematics is that of `ddp`, so this would be a fault",
    "localsgd": "the workers' weights drift apart for H steps, and their plain mean goes only as far as they agree",
    "fedavg": "with an outer rate of 1 the mean of the changes is the mean of the weights, so it is `localsgd`",
    "slowmo": "as `localsgd`, and its outer momentum wants more rounds than a short run has",
    "postlocal-sgd": "after its first steps, with a mean after each, it drifts as `localsgd` does",
    "diloco": "as `localsgd`, made up for by an outer momentum that wants more rounds than a short run has",
    "diloco-islands": "as `diloco`, with half as many replicas to drift apart",
    "streaming-diloco": "as `diloco`, and half of what lands is blended away, in 4-bit floats",
    "delayed": "what lands was measured a round ago, at weights that have moved on since",
    "eager": "the others' part of what lands is a round old, which asks for a low outer rate",
    "noloco": "a worker hears of one other in a round, so news takes several rounds to reach everybody",
    "streaming-noloco": "as `noloco`, with landings that are blended in later",
    "sparta": "a step averages a small random part of the weights; the rest has drifted when its turn comes",
    "sparseloco": "most of a round's change waits in the error feedback, and a short run ends before it is sent",
    "dilocox": "what lands is a round old and cut to a low rank; the error feedback wants rounds to send the rest",
    "demo": "a step tells the signs of a few coefficients, and the inner optimizer is SGD instead of AdamW",
    "dct-dp": "small gradients wait in the error feedback and arrive in bursts, which AdamW takes badly",
    "ist": "a worker trains its part of the hidden units without the others', off the full model's optimum",
}
