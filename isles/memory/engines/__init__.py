"""Who moves bytes and updates parameters beside the computation.

`base`         what the executor asks of an engine: lanes, events, moves
`paced`        a thread a lane (CPU); `cuda`: a stream a direction; `inline`: no lanes, work is done at once
`moves`        how bytes go between host and device
"""
