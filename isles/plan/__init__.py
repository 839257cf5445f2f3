"""The plan of a run, made before anything is started or written: memory, exchanges, bytes and time of its workers."""
