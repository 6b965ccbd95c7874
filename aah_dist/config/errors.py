"""The error of a setting that cannot work, and the checks of single fields."""

from __future__ import annotations


class ConfigError(ValueError):
    """A setting that cannot work.  Its text is one sentence: field, value, and what would be right."""


class RankError(ConfigError):
    """A ConfigError that not every rank sees; the rank it befalls prints it, whichever that is."""


def at_least(section: str, config: object, low: float, *names: str) -> None:
    """Raises ConfigError for a field below `low`; unset fields (None) pass."""
    for name in names:
        value = getattr(config, name)
        if value is not None and value < low:
            raise ConfigError(f"{section}.{name} is {value}; it must be at least {low}.")


def fraction(section: str, config: object, *names: str) -> None:
    """Raises ConfigError for a field outside [0, 1); unset fields (None) pass."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not 0 <= value < 1:
            raise ConfigError(f"{section}.{name} is {value}; it must be at least 0 and below 1.")
