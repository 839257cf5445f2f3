"""Drawing: SVG and PNG, axes, styles."""
