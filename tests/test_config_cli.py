"""The command line: precedence, presets and regimes, help, and one sentence for each mistake."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from refusals import error_of

from aah_dist.config.cli import parse_args
from aah_dist.config.load import base_values, config_hash, load_config, read_config, save_config
from aah_dist.config.parser import FIELDS
from aah_dist.config.schema import ModelConfig, RunConfig

pytestmark = pytest.mark.usefixtures("frozen_demo")

EXAMPLE = ("--train.steps 20 --train.micro_batch_size 1 --train.global_batch_size 8 --train.seed 0 "
           "--model.seq_length 512 --model.num_layers 4 --model.hidden_size 192 --model.num_heads 12 "
           "--model.num_kv_heads 4 --parallel.tensor_parallel_size 2 --parallel.sequence_parallel true "
           "--model.dropout 0 --aah.windows [64,128,256,512] --checkpoint.interval 100 --log.interval 10").split()


def test_no_argument_is_the_demo_preset():
    config, flags = parse_args([])
    assert (config.preset, config.regime, flags.dry_run) == ("demo", "fixed_window", False)
    assert config == load_config()
    assert config.data.text == ["stdlib"] and config.model.seq_length == 512


def test_the_documented_example_parses():
    config, _ = parse_args(EXAMPLE)
    assert config.train.steps == 20 and config.train.global_batch_size == 8
    assert config.model.num_kv_heads == 4 and config.parallel.tensor_parallel_size == 2
    assert config.parallel.sequence_parallel is True
    assert config.model.dropout == 0.0 and isinstance(config.model.dropout, float)
    assert config.aah.windows == [64, 128, 256, 512]


@pytest.mark.parametrize("argv", [["--local_rank=3"], ["--local_rank", "3"], ["--local-rank=3"], ["--local-rank", "3"]])
def test_the_launchers_local_rank_is_ignored(argv):
    assert parse_args([*argv, "--train.steps", "7"])[0] == parse_args(["--train.steps", "7"])[0]
    assert parse_args(["--train.steps", "7", *argv])[0].train.steps == 7


def test_each_value_type_reaches_its_field():
    config, flags = parse_args(["--train.lr=3e-4", "--aah.fixed_window", "[[64],[0.5],[128],[1.0]]", "--dry_run",
                                "--model.num_kv_heads", "null", "--data.text", "[a.txt, b/*.gz]", "--train.seed=0",
                                "--checkpoint.steps", "[5]", "--parallel.tensor_parallel_size", "auto"])
    assert config.train.lr == 3e-4
    assert config.aah.fixed_window == [[64], [0.5], [128], [1.0]]
    assert config.data.text == ["a.txt", "b/*.gz"] and config.checkpoint.steps == [5]
    assert config.model.num_kv_heads is None and flags.dry_run


def test_precedence(tmp_path):
    regime = tmp_path / "r.yaml"
    regime.write_text("description: x\naah: {policy: fixed_window, fixed_window: 32, windows: [32, 512]}\n")
    preset = tmp_path / "p.yaml"
    preset.write_text(f"regime: {regime}\naah: {{fixed_window: 16}}\ntrain: {{steps: 3, lr: 1e-3}}\n")
    assert load_config(str(preset)).aah.fixed_window == 16
    assert load_config(str(preset)).aah.windows == [32, 512]
    assert load_config(str(preset)).train.lr == 1e-3
    assert load_config(str(preset), str(regime)).aah.fixed_window == 32
    argv = ["--preset", str(preset), "--regime", str(regime), "--aah.fixed_window", "8", "--train.steps", "4"]
    config, _ = parse_args(argv)
    assert (config.aah.fixed_window, config.train.steps, config.train.micro_batch_size) == (8, 4, 4)
    assert config == load_config(str(preset), str(regime), {"aah.fixed_window": 8, "train.steps": 4})


def test_a_regime_replaces_the_presets_own():
    config = load_config("demo", "full_attention")
    assert (config.aah.policy, config.aah.fixed_window, config.regime) == ("full_attention", None, "full_attention")


@pytest.mark.parametrize("preset", ["demo", "1b_4096", "1b_4096_standard"])
@pytest.mark.parametrize("regime", [None, "full_attention", "fixed_window"])
def test_saved_and_read_back_it_is_equal(tmp_path, preset, regime):
    config = load_config(preset, regime, {"output_dir": "runs/x", "train.eps": 1e-9, "aah.windows": [0.5, 1.0]})
    save_config(config, tmp_path / "config.yaml")
    again = read_config(tmp_path / "config.yaml")
    assert again == config and config_hash(again) == config_hash(config)
    assert load_config(str(tmp_path / "config.yaml")).to_dict() == {
        **config.to_dict(), "preset": str(tmp_path / "config.yaml")}


def test_the_hash_sees_every_field():
    config = load_config()
    assert len(config_hash(config)) == 64
    assert config_hash(load_config(overrides={"log.interval": 11})) != config_hash(config)


def test_print_config_is_the_whole_and_reads_back(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        parse_args(["--print_config", "--train.steps", "9"])
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    assert {f"{s}.{f}" for s, fields in yaml.safe_load(printed).items() if isinstance(fields, dict)
            for f in fields} == set(FIELDS)
    (tmp_path / "c.yaml").write_text(printed)
    assert read_config(tmp_path / "c.yaml").train.steps == 9


def test_help_is_grouped_and_documents_every_field(capsys):
    with pytest.raises(SystemExit) as stop:
        parse_args(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    joined = " ".join(text.split())
    for section in ("run", "model", "aah", "data", "train", "parallel", "checkpoint", "log"):
        assert f"\n{section}:\n" in text
    for field in FIELDS:
        assert f"--{field} " in text
    assert "Key/value heads (GQA); a divisor of num_heads." in joined
    assert "examples: pretrain.py" in joined
    assert text.startswith("usage: pretrain.py [--preset NAME]")


@pytest.mark.parametrize("argv, parts", [
    (["--preset", "demoo"], ["preset demoo", "nearest is demo"]),
    (["--preset=1b_4095"], ["preset 1b_4095", "nearest is 1b_4096"]),
    (["--preset", "zzz"], ["preset zzz", "1b_4096_standard, demo"]),
    (["--preset", "none.yaml"], ["none.yaml does not exist"]),
    (["--regime", "fixed_windows"], ["regime fixed_windows", "nearest is fixed_window"]),
    (["--regime", "none.yaml"], ["none.yaml does not exist"]),
    (["--train.step", "3"], ["--train.step ", "nearest is --train.steps"]),
    (["--train.step=3"], ["--train.step ", "nearest is --train.steps"]),
    (["--steps", "3"], ["--steps", "steps."]),
    (["--model", "x"], ["--model is a section", "model.num_layers"]),
    (["--qqqqqqqq", "1"], ["--qqqqqqqq is not an option", "--help"]),
    (["extra"], ["extra is not an option"]),
    (["--train.steps"], ["--train.steps needs a value"]),
    (["--preset"], ["--preset needs a value"]),
    (["--regime="], ["--regime needs a value"]),
    (["--dry_run=true"], ["--dry_run takes no value"]),
    (["--train.steps", "abc"], ["train.steps is abc", "a whole number"]),
    (["--train.steps="], ["train.steps is ''", "a whole number"]),
    (["--train.steps", "2.5"], ["train.steps is 2.5", "a whole number"]),
    (["--train.steps", "true"], ["train.steps is true", "a whole number"]),
    (["--train.lr", "fast"], ["train.lr is fast", "a number"]),
    (["--train.lr", ".nan"], ["train.lr is nan", "finite"]),
    (["--train.lr", ".inf"], ["train.lr is inf", "finite"]),
    (["--parallel.sequence_parallel", "maybe"], ["parallel.sequence_parallel is maybe", "true or false"]),
    (["--parallel.tensor_parallel_size", "two"], ["tensor_parallel_size is two", "auto, or a whole number"]),
    (["--model.position", "alibi"], ["model.position is alibi", "learned or rope"]),
    (["--aah.windows", "64"], ["aah.windows is 64", "a list [...] of numbers"]),
    (["--aah.windows", "[a]"], ["aah.windows is [a]", "of numbers"]),
    (["--aah.windows", "[true]"], ["aah.windows is [true]", "of numbers"]),
    (["--aah.fixed_window", "wide"], ["aah.fixed_window is wide", "a list [...] of lists of numbers"]),
    (["--data.text", "stdlib"], ["data.text is stdlib", "a list [...] of texts"]),
])
def test_a_mistake_is_one_sentence(argv, parts):
    text = error_of(parse_args, argv)
    for part in parts:
        assert part in text


@pytest.mark.parametrize("argv, text", [
    (["--model.hidden_size", "100"],
     "model.hidden_size 100 is not a multiple of model.num_heads 12; the nearest that is: 96 or 108."),
    (["--model.num_kv_heads", "5"], "model.num_kv_heads 5 does not divide model.num_heads 12."),
    (["--train.steps", "0"], "train.steps is 0; it must be at least 1."),
    (["--train.lr", "-1"], "train.lr is -1.0; it must be at least 0."),
    (["--model.dropout", "1"], "model.dropout is 1.0; it must be at least 0 and below 1."),
    (["--aah.windows", "[]"], "aah.windows is empty; give at least one window, for example [64, 128, 256, 512]."),
    (["--regime", "full_attention", "--aah.fixed_window", "64"],
     "aah.fixed_window 64 has no effect under aah.policy full_attention; "
     "add --aah.policy fixed_window or leave it out."),
])
def test_the_schemas_own_sentences_come_out_unchanged(argv, text):
    assert error_of(parse_args, argv) == text


def test_seq_length_above_the_position_table():
    text = error_of(parse_args, ["--preset", "1b_4096", "--model.seq_length", "5000"])
    assert "model.seq_length 5000" in text and "4096" in text


@pytest.mark.parametrize("content, parts", [
    ("trian: {steps: 3}", ["trian", "nearest is train"]),
    ("train: {step: 3}", ["train.step,", "nearest is train.steps"]),
    ("train: {steps: many}", ["train.steps is many", "a whole number"]),
    ("train: 3", ["section train", "3"]),
    ("train:", ["section train", "None"]),
    ("- a", ["holds list"]),
    ("", ["holds NoneType"]),
    ("a: [", ["not valid YAML"]),
    ("a: !!python/object/apply:os.getcwd []", ["not valid YAML"]),
    ("regime: [a]", ["regime", "['a']"]),
    ("regime: nope", ["regime nope is unknown"]),
    ("5: x", ["sets 5"]),
])
def test_a_mistake_in_a_preset_file_is_one_sentence(tmp_path, content, parts):
    path = tmp_path / "p.yaml"
    path.write_text(content)
    text = error_of(parse_args, ["--preset", str(path)])
    for part in ["p.yaml", *parts] if "steps: many" not in content and "nope" not in content else parts:
        assert part in text


def test_a_regime_may_only_set_aah(tmp_path):
    (tmp_path / "r.yaml").write_text("train: {steps: 3}")
    assert "sets train; it may only set aah" in error_of(load_config, "demo", str(tmp_path / "r.yaml"))


def test_read_config_refuses_what_it_does_not_know(tmp_path):
    (tmp_path / "c.yaml").write_text("model: {layers: 3}")
    assert "model.layers" in error_of(read_config, tmp_path / "c.yaml")
    assert "does not exist" in error_of(read_config, tmp_path / "d.yaml")


def test_load_config_names_the_nearest_field():
    assert "nearest is train.global_batch_size" in error_of(load_config, overrides={"train.globalbatch_size": 3})


def test_defaults_are_the_dataclasses(tmp_path):
    (tmp_path / "empty.yaml").write_text("description: nothing")
    config = load_config(str(tmp_path / "empty.yaml"))
    assert config.model == ModelConfig() and config.train == RunConfig().train
    assert set(base_values("demo", None)) == {"regime", "preset", "model", "aah", "data", "train"}


def test_presets_and_regimes_say_what_they_are_for():
    folder = Path(sys.modules["aah_dist.config.load"].__file__).parent
    for path in [*folder.glob("presets/*.yaml"), *folder.glob("regimes/*.yaml")]:
        assert yaml.safe_load(path.read_text())["description"].endswith("."), path


def test_importing_the_schema_does_not_import_the_parser():
    code = "import sys, aah_dist.config.schema; sys.exit('jsonargparse' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1]).returncode == 0


def test_the_presets_text_is_not_put_under_another_path():
    config, _ = parse_args(["--data.path", "data/books"])
    assert config.data.text is None and config.data.tokenizer is None
    config, _ = parse_args(["--data.path=data/books", "--data.text", "[books]", "--data.tokenizer", "gpt2/"])
    assert config.data.text == ["books"] and config.data.tokenizer == "gpt2/"
    assert load_config(overrides={"data.path": "data/books"}).data.text is None
    assert parse_args([])[0].data.text == ["stdlib"]


@pytest.mark.parametrize("argv, words", [
    (["--output_dir="], "output_dir is empty"),
    (["--model.rope_base", "0"], "model.rope_base is 0; it must be at least 2"),
    (["--train.lr", "1e-3", "--train.min_lr", "1"], "train.min_lr 1.0 is above train.lr 0.001"),
])
def test_values_out_of_range(argv, words):
    assert words in error_of(parse_args, argv)


def test_a_yaml_key_given_twice_is_refused(tmp_path):
    (tmp_path / "a.yaml").write_text("model: {num_layers: 2, num_layers: 3}\n")
    assert "key num_layers is given twice" in error_of(load_config, str(tmp_path / "a.yaml"))
