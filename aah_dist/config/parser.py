"""The typed command line: jsonargparse over the dataclasses.  Nothing else imports jsonargparse."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import re
import typing
from typing import Any, Dict, List, Sequence

import docstring_parser
import jsonargparse

from aah_dist.config.nearest import nearest
from aah_dist.config.schema import ConfigError, RunConfig

SECTIONS: Dict[str, type] = {f.name: f.default_factory for f in dataclasses.fields(RunConfig)
                             if dataclasses.is_dataclass(f.default_factory)}
FIELDS: Dict[str, Any] = {f"{section}.{name}": hint for section, cls in SECTIONS.items()
                          for name, hint in typing.get_type_hints(cls).items()}
RUN_OPTIONS = {
    "preset": "Starting values: a preset's name, or a YAML file of the same form.",
    "regime": "Which windows the heads get: a regime's name, or a YAML file with an aah section. "
              "Unset: the preset's own, else full_attention.",
    "ds_config": "DeepSpeed JSON: ZeRO stage, precision, offload, communication. Looked for from here, then from the "
                 "repository.",
    "output_dir": "The run's folder: metrics, checkpoints, the resolved configuration.",
}
FLAGS = {
    "print_config": "Print the resolved configuration as YAML and stop.",
    "dry_run": "Check everything, print parameters, layout and memory per rank, and stop before training.",
}
EXAMPLES = ("examples:  pretrain.py --preset 1b_4096 --dry_run  |  pretrain.py --train.steps 20 --aah.windows "
            "'[64,128,256,512]'  |  pretrain.py --regime full_attention --output_dir runs/full")


def make_parser(prog: str) -> jsonargparse.ArgumentParser:
    parser = jsonargparse.ArgumentParser(
        prog=prog, exit_on_error=False, allow_abbrev=False, epilog=EXAMPLES,
        usage="%(prog)s [--preset NAME] [--regime NAME] [--ds_config FILE] [--output_dir DIR] "
              "[--SECTION.FIELD VALUE ...]",
        description="Values come from the defaults, then the preset, then the regime, then this command line.")
    run = parser.add_argument_group("run")
    defaults, hints = RunConfig(), typing.get_type_hints(RunConfig)
    for name, text in RUN_OPTIONS.items():
        run.add_argument(f"--{name}", type=hints[name], default=getattr(defaults, name), help=text)
    for name, text in FLAGS.items():
        run.add_argument(f"--{name}", action="store_true", help=text)
    for section, cls in SECTIONS.items():
        title, help_texts = _documentation(cls)
        group = parser.add_argument_group(section, title)
        values = cls()
        for field in dataclasses.fields(cls):
            group.add_argument(f"--{section}.{field.name}", type=FIELDS[f"{section}.{field.name}"],
                               default=getattr(values, field.name), help=help_texts[field.name])
    return parser


@functools.cache
def _documentation(cls: type) -> typing.Tuple[str, Dict[str, str]]:
    """A section's title and its fields' help, from the docstrings in the source."""
    doc = docstring_parser.parse_from_object(cls)
    title = " ".join(text for text in (doc.short_description, doc.long_description) if text)
    return title, {p.arg_name: " ".join(p.description.split()) for p in doc.params}


def typed_values(values: Dict[str, Any], source: str) -> Dict[str, Any]:
    """`values` as {section: {field: value}, option: value} with every field present and of its declared type.

    Raises ConfigError, naming `source`, for unknown names and wrong types.
    """
    check_names(values, source)
    try:
        return _finite(make_parser("").parse_object(values).as_dict())
    except argparse.ArgumentError as error:
        raise ConfigError(_type_sentence(str(error), lambda key: _lookup(values, key))) from None


def parse_command_line(argv: Sequence[str], defaults: Dict[str, Any], prog: str) -> Dict[str, Any]:
    """`argv` over `defaults` (the result of typed_values), with a bool for each of FLAGS.

    Prints the help and exits 0 on --help.
    """
    parser = make_parser(prog)
    parser.set_defaults({key: _lookup(defaults, key) for key in FIELDS})
    parser.set_defaults({key: defaults[key] for key in RUN_OPTIONS})
    _check_options(argv)
    # jsonargparse gives --print_config a meaning of its own, so the flags are for the help only.
    flags = {name: f"--{name}" in argv for name in FLAGS}
    fields = [argument for argument in argv if argument[2:] not in FLAGS]
    try:
        return {**_finite(parser.parse_args(fields).as_dict()), **flags}
    except argparse.ArgumentError as error:
        raise ConfigError(_type_sentence(str(error), lambda key: last_value(argv, f"--{key}"))) from None


def last_value(argv: Sequence[str], option: str) -> typing.Optional[str]:
    """The value of an option's last occurrence (`--x V` or `--x=V`); None where it is not given."""
    value = None
    for i, argument in enumerate(argv):
        if argument == option:
            value = argv[i + 1] if i + 1 < len(argv) else None
        elif argument.startswith(option + "="):
            value = argument.partition("=")[2]
    return value


def check_names(values: Dict[str, Any], source: str) -> None:
    """Raises ConfigError for a section, field or option that does not exist."""
    known = [*SECTIONS, *RUN_OPTIONS]
    for section, content in values.items():
        if section not in known:
            raise ConfigError(f"{source} sets {section}, which does not exist; {nearest(str(section), known)}.")
        if section not in SECTIONS:
            continue
        if not isinstance(content, dict):
            raise ConfigError(f"{source} gives section {section} the value {content!r}; it must hold fields.")
        for name in content:
            if f"{section}.{name}" not in FIELDS:
                raise ConfigError(f"{source} sets {section}.{name}, which does not exist; "
                                  f"{_nearest_field(f'{section}.{name}')}.")


def _nearest_field(name: str) -> str:
    own = [field for field in FIELDS if field.startswith(name.partition(".")[0] + ".")]
    return nearest(name, own or FIELDS)


def _check_options(argv: Sequence[str]) -> None:
    names = [*RUN_OPTIONS, *FLAGS, *FIELDS]
    for argument in argv:
        # jsonargparse reads `--list+` as "append".
        option, equals, _ = argument.partition("=")
        option = option.rstrip("+")
        if option.startswith("--") and option[2:] in SECTIONS:
            raise ConfigError(f"{option} is a section; set its fields, for example "
                              f"{next(field for field in FIELDS if field.startswith(option[2:] + '.'))}.")
        if equals and option[2:] in FLAGS:
            raise ConfigError(f"{option} takes no value.")
        if option.startswith("--") and option[2:] not in names and option != "--help":
            raise ConfigError(f"{option} is not an option; {nearest(option, ['--' + name for name in names])}.")


def _finite(values: Dict[str, Any]) -> Dict[str, Any]:
    for key in FIELDS:
        value = _lookup(values, key)
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{key} is {value}; it must be a finite number.")
    return values


def _type_sentence(message: str, given: typing.Callable[[str], Any]) -> str:
    """One sentence for jsonargparse's several lines."""
    key = re.search(r'Parser key "([\w.]+)"', message)
    if key and key[1] in FIELDS:
        value = given(key[1])
        shown = value if isinstance(value, str) and value else repr(value)
        return f"{key[1]} is {shown}; it must be {_describe(FIELDS[key[1]])}."
    if "expected one argument" in message:
        return f"{message.partition('argument ')[2].partition(':')[0].split(',')[0]} needs a value."
    if "unrecognized arguments" in message:
        return f"{message.partition(': ')[2]} is not an option; options look like --train.steps 20."
    return " ".join(message.split()).rstrip(".") + "."


def _lookup(values: Dict[str, Any], key: str) -> Any:
    section, _, name = key.partition(".")
    return values.get(section, {}).get(name)


def _describe(hint: Any, plural: bool = False) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", type(None): "null"}
    arguments: List[Any] = list(typing.get_args(hint))
    if hint in names:
        return names[hint].removeprefix("a ") + "s" if plural else names[hint]
    if typing.get_origin(hint) is typing.Literal:
        return " or ".join(map(str, arguments))
    if typing.get_origin(hint) is list:
        return f"{'lists' if plural else 'a list [...]'} of {_describe(arguments[0], plural=True)}"
    if int in arguments and float in arguments:
        arguments.remove(int)
    return ", or ".join(_describe(argument, plural) for argument in arguments)
