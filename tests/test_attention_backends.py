"""The registry: what each backend takes, what is refused and with which way out, and what auto chooses."""

import subprocess
import sys
import types
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import torch

from aah_dist.attention import backends, check_backend, flash, flex, native_library, triton_attention, window_attention
from aah_dist.attention.backends import BACKENDS, Inputs, choose, resolve
from aah_dist.config.aah import AahConfig
from aah_dist.config.load import load_config
from aah_dist.config.schema import ConfigError

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
PACKAGE = Path(backends.__file__).parents[1]


def inputs(device=CUDA, dtype=torch.bfloat16, length=4096, head_size=128, dropout_p=0.0, training=True):
    return Inputs(device, dtype, length, head_size, dropout_p, training)


CACHES = resolve, backends._announce, flash.library, native_library.load


def forget():
    for kept in CACHES:
        kept.cache_clear()


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    forget()
    yield
    forget()


def mock_machine(monkeypatch, gpu=True, triton=True, flash_attn=True, compiler=True):
    for owner in ("aah_dist.parallel.device", "aah_dist.attention.triton_attention"):
        monkeypatch.setattr(f"{owner}.has_gpu", lambda: gpu)
    for module in (triton_attention, flex):
        monkeypatch.setattr(module, "find_spec", lambda name: object() if triton else None)
    package = types.ModuleType("flash_attn")
    package.flash_attn_func, package.__version__ = (lambda: None), "2.8.3"
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    if not flash_attn:
        def broken():
            raise ImportError("undefined symbol: x\nand more")

        monkeypatch.setattr(flash, "library", broken)
    if not compiler:
        monkeypatch.setattr(native_library.shutil, "which", lambda name: None)
        monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "/nonexistent")
    forget()


def refused(call, *args, **options):
    with pytest.raises(ConfigError) as error:
        call(*args, **options)
    sentence = str(error.value)
    assert "\n" not in sentence and sentence.endswith(".") and not sentence.endswith("..")
    return sentence


def test_the_configuration_names_the_same_backends():
    assert set(get_args(get_type_hints(AahConfig)["backend"])) == {"auto", *BACKENDS}


def test_listing_backends_loads_no_gpu_library():
    code = ("import sys, aah_dist.attention; "
            "print([m for m in ('triton', 'flash_attn', 'torch.nn.attention.flex_attention') if m in sys.modules])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_only_the_flash_file_knows_the_library_convention():
    knowing = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py")
               if "window_size" in path.read_text(encoding="utf-8")}
    assert knowing == {"attention/flash.py"}


@pytest.mark.parametrize("preset", ["1b_4096", "1b_4096_standard"])
def test_the_paper_run_gets_a_backend_with_attention_dropout_on_an_h100(preset, monkeypatch):
    model = load_config(preset).model
    assert preset != "1b_4096" or model.attention_dropout_p == 0.1
    for triton, expected in ((True, "triton"), (False, "banded")):
        mock_machine(monkeypatch, triton=triton)
        name = check_backend("auto", CUDA, torch.bfloat16, model.seq_length, model.head_dim, model.attention_dropout_p)
        if model.attention_dropout_p:
            assert name == expected and BACKENDS[name].dropout
        else:
            assert name == ("triton" if triton else "flash")


@pytest.mark.parametrize("given, machine, expected", [
    ({}, {}, "triton"),
    ({}, {"triton": False}, "flash"),
    ({}, {"triton": False, "flash_attn": False}, "banded"),
    ({"dtype": torch.float32}, {}, "triton"),
    ({"dtype": torch.float32}, {"triton": False}, "banded"),
    ({"dtype": torch.float64}, {}, "banded"),
    ({"head_size": 288}, {}, "banded"),
    ({"dropout_p": 0.1}, {}, "triton"),
    ({"dropout_p": 0.1, "dtype": torch.float16}, {"triton": False}, "banded"),
    ({"device": CPU}, {}, "native"),
    ({"device": CPU, "dropout_p": 0.1}, {"gpu": False}, "native"),
    ({"device": CPU, "dtype": torch.float32, "training": False}, {"gpu": False}, "native"),
    ({"device": CPU, "dropout_p": 0.1}, {"compiler": False}, "banded"),
])
def test_auto(given, machine, expected, monkeypatch):
    mock_machine(monkeypatch, **machine)
    name, reason = choose(inputs(**given))
    assert name == expected
    # Every backend that would have come first is named with what keeps it from running.
    order = list(backends.ORDER if inputs(**given).device.type == "cuda" else backends.ORDER_CPU)
    for passed_over in order[:order.index(name)]:
        assert f"not {passed_over}: " in reason


def test_flex_is_chosen_where_triton_refuses_and_flash_does(monkeypatch):
    mock_machine(monkeypatch, flash_attn=False)
    monkeypatch.setattr(triton_attention, "missing", lambda: "the triton backend is away.")
    assert choose(inputs())[0] == "flex"


def test_auto_without_the_gpu_it_needs(monkeypatch):
    mock_machine(monkeypatch, gpu=False)
    assert "no CUDA device" in refused(resolve, "auto", inputs())


@pytest.mark.parametrize("name, given, machine, words", [
    ("flash", {"device": CPU}, {"gpu": False}, ["flash backend runs on cuda", "use backend native"]),
    ("triton", {"device": CPU}, {"gpu": False}, ["triton backend runs on cuda", "use backend native"]),
    ("flash", {}, {"gpu": False}, ["no CUDA device", "no other backend"]),
    ("triton", {}, {"triton": False}, ["pip install triton, or use backend flash"]),
    ("flex", {"dtype": torch.float32}, {"triton": False}, ["pip install triton, or use backend banded"]),
    ("flash", {}, {"flash_attn": False}, ["undefined symbol: x)", "use backend triton"]),
    ("flash", {"dtype": torch.float32}, {}, ["bfloat16, float16, not float32; use backend triton"]),
    ("flash", {"head_size": 100}, {}, ["8 to 256 in steps of 8, not 100; use backend triton"]),
    ("flash", {"head_size": 264}, {}, ["not 264; use backend banded"]),
    ("flash", {"dropout_p": 0.1}, {}, ["dropout (0.1)", "use backend triton"]),
    ("flash", {"dropout_p": 0.1}, {"triton": False}, ["dropout (0.1)", "use backend banded"]),
    ("flex", {"dropout_p": 0.1}, {}, ["dropout (0.1)", "use backend triton"]),
    ("flex", {"head_size": 8}, {}, ["16 to 256, not 8; use backend triton"]),
    ("flex", {"device": CPU}, {"gpu": False}, ["no backward pass on cpu; use backend native"]),
    ("triton", {"dtype": torch.float64}, {}, ["not float64; use backend banded"]),
    ("dense", {"length": 2049}, {}, ["at most 2048", "2049; use backend triton"]),
    ("native", {"device": CPU}, {"compiler": False}, ["it finds none (install g++); use backend banded"]),
    ("native", {}, {}, ["runs on cpu, not on cuda; use backend triton"]),
    ("banded", {"dtype": torch.int32}, {}, ["not int32; no other backend"]),
])
def test_refusals_name_what_can_run(name, given, machine, words, monkeypatch):
    mock_machine(monkeypatch, **machine)
    sentence = refused(resolve, name, inputs(**given))
    assert sentence.startswith(f"backend is {name}, but ")
    for word in words:
        assert word in sentence, sentence


def test_check_backend_speaks_of_the_configuration(monkeypatch):
    mock_machine(monkeypatch, gpu=False)
    sentence = refused(check_backend, "flash", CPU, torch.bfloat16, 4096, 128, 0.0)
    assert sentence == "aah.backend is flash, but the flash backend runs on cuda, not on cpu; use aah.backend native."
    assert check_backend("banded", CPU, torch.float32, 4096, 128, 0.1) == "banded"
    assert "dense, native, banded, flash" in refused(check_backend, "sparse", CPU, torch.float32, 8, 8, 0.0)


def test_what_can_run_is_accepted(monkeypatch):
    mock_machine(monkeypatch)
    for name in ("flash", "flex", "triton", "banded"):
        assert resolve(name, inputs()).name == name
    assert resolve("flex", inputs(device=CPU, dtype=torch.float32, training=False)).name == "flex"


def test_triton_runs_on_cpu_in_the_interpreter_only(monkeypatch):
    mock_machine(monkeypatch, gpu=False)
    assert BACKENDS["triton"].obstacle(inputs(device=CPU, dtype=torch.float32)) is not None
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert BACKENDS["triton"].obstacle(inputs(device=CPU, dtype=torch.float32)) is None
    assert "multiplies its bits" in BACKENDS["triton"].obstacle(inputs(device=CPU, dtype=torch.bfloat16))
    assert choose(inputs(device=CPU))[0] == "native"


def test_every_backend_has_its_function():
    for name, backend in BACKENDS.items():
        assert backend.run.__name__ == f"{name}_attention"


def test_auto_says_once_what_it_chose_and_why(capfd, monkeypatch):
    mock_machine(monkeypatch, triton=False)
    for _ in range(3):
        resolve("auto", inputs())
        resolve("auto", inputs(length=128))
        resolve("auto", inputs(dropout_p=0.1))
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("attention backend: flash (auto: ") and "pip install triton" in lines[0]
    assert lines[1].startswith("attention backend: banded (auto: ") and "dropout (0.1)" in lines[1]


def test_other_ranks_are_silent(capfd, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    resolve("auto", inputs(device=CPU))
    assert capfd.readouterr().err == ""


def test_another_machine_says_what_it_lacks(capfd, monkeypatch):
    mock_machine(monkeypatch, compiler=False)
    monkeypatch.setenv("RANK", "3")
    for local, printed in (("1", ""), ("0", "attention backend of rank 3: banded (auto: ")):
        monkeypatch.setenv("LOCAL_RANK", local)
        forget()
        resolve("auto", inputs(device=CPU))
        assert capfd.readouterr().err.startswith(printed) and (local == "0" or not capfd.readouterr().err)


def test_a_requested_backend_is_never_replaced(monkeypatch):
    """Neither by another one nor in silence: the call fails before any work."""
    q = torch.randn(1, 2, 8, 16)
    ran = []
    for name in ("native", "banded"):
        monkeypatch.setattr(f"aah_dist.attention.{name}.{name}_attention", lambda *args: ran.append(args))
    for name in ("flash", "triton"):
        refused(window_attention, q, q, q, [3, 8], backend=name)
    assert not ran


def test_command_lists_every_backend():
    done = subprocess.run([sys.executable, "-m", "aah_dist.attention"], capture_output=True, text=True, check=True)
    for name in BACKENDS:
        assert f"{name}: " in done.stdout
    assert "  cpu: can run\n" in done.stdout and "  cpu: can run forward only\n" in done.stdout
    assert "cpu, float32, attention dropout 0.1: native (" in done.stdout
    if not torch.cuda.is_available():
        assert done.stdout.count("  cuda: cannot run: ") == len(BACKENDS)
        assert "cuda: no CUDA device here" in done.stdout


def test_command_with_a_gpu(capsys, monkeypatch):
    from aah_dist.attention import __main__ as command

    mock_machine(monkeypatch)
    monkeypatch.setattr(command, "has_gpu", lambda: True)
    command.main()
    shown = capsys.readouterr().out
    assert "cuda: can run, through flash-attn 2.8.3" in shown
    for dtype in ("bfloat16", "float32"):
        for dropout in ("0", "0.1"):
            assert f"cuda, {dtype}, attention dropout {dropout}: triton (" in shown
