"""Configuration: one pydantic model per role, read from TOML, overridden with `--set`, saved resolved in the run directory."""

from segue.config.root import Config, load_config, parse_overrides, to_toml

__all__ = ["Config", "load_config", "parse_overrides", "to_toml"]
