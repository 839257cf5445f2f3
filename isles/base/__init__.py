"""What every room uses: errors, files, tables, names of settings. Nothing here is about training.

`errors`     a user's mistake in one line; text that others wrote; warnings
`durable`    files that are written whole or not at all
`parsing`    JSON, TOML and messages from outside, measured before they are parsed; `tables`: TOML tables as dataclasses
`schema`     names of files, backends and fields, for rooms that load no torch
`imports`    "package.module:name", names that load on first use; `parts`: settings that name such code
`modes`      torch's modes, and copies between host and GPU; `wrapping`: optimizers around others
`version`    the version of this package
"""
