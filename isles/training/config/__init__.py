"""What a user may set: sections, reading TOML, the template, inner optimizers, presets."""
