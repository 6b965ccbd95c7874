"""Presets and regimes on disk, and a resolved configuration saved and read back."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Dict, Mapping, Optional, Set, Union

import yaml

from aah_dist.config.nearest import nearest
from aah_dist.config.parser import FIELDS, RUN_OPTIONS, SECTIONS, check_names, typed_values
from aah_dist.config.schema import ConfigError, RunConfig

FOLDER = Path(__file__).parent
Values = Dict[str, Any]
# What a preset says of aah under any regime: the sizes of its model and its schedule. All else is the regime's.
KEPT = {"windows", "warmup_steps", "interval", "backend", "head_blocks", "entropy_rows"}


def load_config(preset: str = "demo", regime: Optional[str] = None,
                overrides: Optional[Mapping[str, Any]] = None) -> RunConfig:
    """The configuration of a preset and a regime (names or YAML files) with dotted overrides, {"train.steps": 20}.

    Raises ConfigError for unknown names, wrong types and values that cannot work.
    """
    values = base_values(preset, regime)
    for key, value in (overrides or {}).items():
        section, _, name = key.partition(".")
        if key not in FIELDS and key not in RUN_OPTIONS:
            raise ConfigError(f"{key} is not a field; {nearest(key, FIELDS)}.")
        if name:
            values.setdefault(section, {})[name] = value
        else:
            values[key] = value
    if overrides:
        own_text_only(values.setdefault("data", {}), {key[5:] for key in overrides if key.startswith("data.")})
    return build_config(typed_values(values, "the configuration"))


def own_text_only(data: Values, given: Set[str]) -> None:
    """The preset's text and tokenizer belong to the preset's path: a mistyped data.path must not be filled with it.

    data: the section's values, changed in place. given: the fields of it that the user set.
    """
    if "path" in given:
        data.update({name: None for name in ("text", "tokenizer") if name not in given})


def base_values(preset: str, regime: Optional[str]) -> Values:
    """What a preset and a regime set: {section: {field: value}, option: value}.

    A regime that the preset itself names lies beneath the preset's own aah section; one given beside the preset lies
    above it, and of the preset's section only KEPT remains.
    """
    values = _read_named("preset", preset)
    own = values.get("aah", {})
    named = regime or values.get("regime") or "full_attention"
    if not isinstance(named, str):
        raise ConfigError(f"preset {preset} gives regime the value {named!r}; it must be a name or a YAML file.")
    regime_values = _read_named("regime", named)
    other = sorted(set(regime_values) - {"aah"})
    if other:
        raise ConfigError(f"regime {named} sets {', '.join(other)}; it may only set aah.")
    theirs = regime_values.get("aah", {})
    values["aah"] = {**{name: own[name] for name in own if name in KEPT}, **theirs} if regime else {**theirs, **own}
    values.update(preset=preset, regime=named)
    return values


def build_config(values: Values) -> RunConfig:
    """A RunConfig from typed values; ConfigErrors of the dataclasses pass through as they are."""
    sections = {name: cls(**values[name]) for name, cls in SECTIONS.items()}
    return RunConfig(**sections, **{name: values[name] for name in RUN_OPTIONS})


def to_yaml(config: RunConfig) -> str:
    """The whole configuration, in the order of the schema."""
    return yaml.safe_dump(config.to_dict(), sort_keys=False, allow_unicode=True)


def save_config(config: RunConfig, path: Union[str, Path]) -> None:
    Path(path).write_text(to_yaml(config), encoding="utf-8")


def read_config(path: Union[str, Path]) -> RunConfig:
    """A configuration written by save_config; equal to the one that was saved."""
    return build_config(typed_values(_read_yaml(Path(path), "configuration"), f"configuration {path}"))


def config_hash(config: RunConfig) -> str:
    """sha256 (64 hex digits) of the configuration as YAML with sorted keys."""
    return hashlib.sha256(yaml.safe_dump(config.to_dict(), sort_keys=True).encode()).hexdigest()


def _read_named(kind: str, name: str) -> Values:
    folder = FOLDER / f"{kind}s"
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        path = folder / f"{name}.yaml"
        known = [p.stem for p in folder.glob("*.yaml")]
        if name not in known:
            raise ConfigError(f"{kind} {name} is unknown; {nearest(name, known)}.")
    values = _read_yaml(path, kind)
    values.pop("description", None)
    check_names(values, f"{kind} {name}")
    return values


class _UniqueKeys(yaml.SafeLoader):
    """Safe loading that refuses a key given twice, of which YAML silently keeps the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = [key for key in keys if keys.count(key) > 1]
        if twice:
            raise yaml.constructor.ConstructorError(None, None, f"key {twice[0]} is given twice", node.start_mark)
        return super().construct_mapping(node, deep)


def _read_yaml(path: Path, kind: str) -> Values:
    if not path.is_file():
        raise ConfigError(f"{kind} file {path} does not exist.")
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeys)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{kind} file {path} is not valid YAML: {' '.join(str(error).split())}.") from None
    except OSError as error:
        raise ConfigError(f"{kind} file {path} cannot be read: {error.strerror}.") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{kind} file {path} holds {type(values).__name__}; it must hold sections, such as train:.")
    return values
