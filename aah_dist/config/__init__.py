"""The run configuration: schema, presets, regimes, command line, and the checks made before any rank trains.

Only the schema is imported here; `cli`, `load`, `validate`, `windows`, `deepspeed` and `size` are imported by name.
"""

from aah_dist.config.schema import ConfigError, RunConfig

__all__ = ["ConfigError", "RunConfig"]
