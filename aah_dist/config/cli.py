"""The main job's command line."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import List, Optional, Sequence, Tuple

from aah_dist.config.load import base_values, build_config, own_text_only, to_yaml
from aah_dist.config.parser import FLAGS, last_value, parse_command_line, typed_values
from aah_dist.config.schema import ConfigError, RunConfig


@dataclass(frozen=True)
class Flags:
    """What the command line asks for beyond a configuration."""

    dry_run: bool


def parse_args(argv: Optional[Sequence[str]] = None, prog: str = "pretrain.py") -> Tuple[RunConfig, Flags]:
    """The run configuration of a command line (sys.argv by default).

    Precedence: dataclass defaults < preset < regime < dotted options.  --help and --print_config print and exit 0.
    Raises ConfigError, one sentence, for everything that cannot work.
    """
    argv = _without_local_rank(sys.argv[1:] if argv is None else argv)
    for option in ("--preset", "--regime"):
        if any(argument.partition("=")[0] == option for argument in argv) and not last_value(argv, option):
            raise ConfigError(f"{option} needs a value.")
    preset = last_value(argv, "--preset") or RunConfig.preset
    base = typed_values(base_values(preset, last_value(argv, "--regime")), f"preset {preset}")
    values = parse_command_line(argv, base, prog)
    flags = {name: values.pop(name) for name in FLAGS}
    given = {field for field in ("path", "text", "tokenizer") if last_value(argv, f"--data.{field}") is not None}
    own_text_only(values["data"], given)
    config = build_config(values)
    if flags["print_config"]:
        print(to_yaml(config), end="")
        raise SystemExit(0)
    return config, Flags(dry_run=flags["dry_run"])


def _without_local_rank(argv: Sequence[str]) -> List[str]:
    """The deepspeed launcher appends --local_rank=N, older torch launchers --local-rank N; ranks come from the
    environment."""
    kept: List[str] = []
    skip = False
    for argument in argv:
        name, equals, _ = argument.partition("=")
        if skip and not argument.startswith("-"):
            skip = False
            continue
        skip = False
        if name in ("--local_rank", "--local-rank"):
            skip = not equals
        else:
            kept.append(argument)
    return kept
