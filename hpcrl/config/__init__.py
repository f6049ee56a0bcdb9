"""Configuration: frozen dataclasses, parsed once at the edge.

`root.Config` is the whole; `load` reads it from YAML and overrides; `sections` holds its parts.
"""
