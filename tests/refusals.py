"""What a refused configuration says."""

from collections.abc import Callable

import pytest

from aah_dist.config.schema import ConfigError


def error_of(call: Callable, *args: object, **kwargs: object) -> str:
    """The ConfigError that call(*args, **kwargs) raises, which must be one line that ends with a full stop."""
    with pytest.raises(ConfigError) as caught:
        call(*args, **kwargs)
    text = str(caught.value)
    assert "\n" not in text and text.endswith(".")
    return text
