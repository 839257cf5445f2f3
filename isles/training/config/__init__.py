"""What a user may set.

`sections`   the configuration, a dataclass a section; `world`: that of `[world]`; `inner`: inner optimizers
`reading`    TOML and `--set` to a configuration; `embedded.toml`: values of a bare `isles train`; `presets`
`conflicts`  which settings go together (conflicts.toml); `trust`: whether named code may be imported
"""
