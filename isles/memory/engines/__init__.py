"""Who moves bytes and updates parameters beside the computation.

`base`         what the executor asks of an engine: lanes, events, moves; `Inline`: no lanes, work is done at once
`paced`        a thread a lane (CPU); `cuda`: a stream a direction
"""
