"""report.py on run folders written by hand, and the end of the demo."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread
from ranks import REPOSITORY, environment
from report_runs import changing_windows, write_lines, write_run

from aah_dist import demo
from aah_dist.config.pairs import acr, exact_pair_ratio
from aah_dist.config.schema import ConfigError
from aah_dist.training import plots
from aah_dist.training.report import summary, write_report
from aah_dist.training.run_records import RunRecords, read_run

PNGS = ["losses.png", "context.png", "windows_end.png", "windows_over_time.png"]
FULL = [{"step": 0, "windows": [[512] * 8] * 3}]
WINDOWS = [64, 128, 256, 512]
ADAPTIVE = {"aah__policy": "adaptive", "aah__warmup_steps": 20, "aah__interval": 5}


def values(text: str) -> dict[str, tuple[str, str]]:
    """name -> (value, source) of every table row of a summary."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    return {row[0]: (row[1], row[2]) for row in rows}


def drawn(draw: Callable[[RunRecords], Figure], run: RunRecords) -> np.ndarray:
    """The picture, int [height, width, 3] from 0 to 255."""
    path = run.folder / "drawn.png"
    draw(run).savefig(path, dpi=plots.DPI)
    return rgb(path)


def rgb(path: Path) -> np.ndarray:
    return np.round(imread(path)[..., :3] * 255).astype(int)


def pixels(path: Path, color: np.ndarray) -> int:
    return int((rgb(path) == color.astype(int)).all(-1).sum())


def shares_drawn(path: Path, palette: plots.Palette) -> np.ndarray:
    counts = np.array([pixels(path, color) for color in palette.colors], dtype=float)
    return counts / counts.sum()


def command(run: Path) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, str(REPOSITORY / "aah_dist" / "report.py"), str(run)], env=environment(),
                          capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def adaptive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished adaptive run with a checkpoint; its last windows are 64 tokens in 12 heads, 128 in 6 and 512 in 6."""
    folder = tmp_path_factory.mktemp("report") / "run"
    last = {"step": 215, "windows": [[64] * 4 + [128] * 2 + [512] * 2] * 3}
    write_run(folder, 220, [*changing_windows(3, 8, 200, 14, WINDOWS), last], aah__head_blocks=2, **ADAPTIVE)
    for step, suffix in ((110, ""), (220, ""), (330, ".partial")):
        checkpoint = folder / "checkpoints" / f"step_{step:08d}{suffix}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "manifest.json").write_text(json.dumps({
            "step": step, "tp": 2, "dp": 3, "zero_stage": 2, "precision": "bf16", "vocab_size": 1000,
            "text_fingerprint": "text"}))
    return folder


def test_the_command_writes_the_report_and_prints_its_paths(adaptive: Path):
    done = command(adaptive)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(adaptive / name) for name in ["summary.md", *PNGS]]
    assert not done.stderr
    for name in PNGS:
        height, width = imread(adaptive / name).shape[:2]
        assert width > 800 and height > 350 and (adaptive / name).stat().st_size > 8000
        assert f"]({name})" in (adaptive / "summary.md").read_text()


def test_the_report_needs_no_torch(adaptive: Path):
    code = ("import sys; from pathlib import Path; from aah_dist.training import entry\n"
            "from aah_dist.training.report import write_report\nfrom aah_dist.training.run_records import read_run\n"
            f"write_report(read_run(Path({str(adaptive)!r})))\n"
            "print([name for name in ('torch', 'deepspeed', 'megatron', 'wandb', 'matplotlib.pyplot') "
            "if name in sys.modules])")
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=120,
                          check=True)
    assert done.stdout == "[]\n"


def test_the_numbers_of_the_summary(adaptive: Path):
    run = read_run(adaptive)
    lines = [json.loads(line) for line in (adaptive / "metrics.jsonl").read_text().splitlines()]
    logged = [line for line in lines if "train/loss" in line]
    text = summary(run)
    shown = values(text)
    lasted = np.diff(np.append(run.policy.steps, 220))
    assert text.startswith("# run\n\nFinished: 220 steps.")
    expected = {
        "regime": "full_attention (policy adaptive)", "preset": "demo", "layout": "TP 2 x DP 3, ZeRO 2, bf16",
        "model": "3 layers, hidden 128, 8 heads, T 512", "batch": "8 samples, 4,096 tokens a step",
        "steps done / planned": "220 / 220", "seed": "7", "commit": "c0ffee",
        "training loss": f"{logged[-1]['train/loss']:.4f} nats a token",
        "validation loss": f"{logged[-1]['val/loss']:.4f} nats a token",
        "validation perplexity": f"{np.exp(logged[-1]['val/loss']):.4g}",
        "unigram entropy of the held-out text": "5.0000 nats a token",
        "validation loss / unigram entropy": f"{logged[-1]['val/loss'] / 5:.3f}",
        "ACR, end": f"{(12 * 64 + 6 * 128 + 6 * 512) / 24 / 512:.4f}",
        "ACR, mean over the run": f"{np.average([acr(w, 512) for w in run.policy.windows], weights=lasted):.4f}",
        "exact pair ratio, end": f"{logged[-1]['aah/exact_pair_ratio']:.4f}",
        "exact pair ratio, mean over the run":
            f"{np.average([exact_pair_ratio(w, 512) for w in run.policy.windows], weights=lasted):.4f}",
        "decisions": "40", "changes of policy": "15",
        # The log lines are those of steps 1, 10, 20, ... 220.
        "speed": "1,110 tokens/s", "peak memory": "620 MiB",
        "64": "12", "128": "6", "512": "6",
    }
    assert {name: shown[name][0] for name in expected} == expected
    assert shown["64"][1] == "50.0 %" and "256" not in shown
    assert shown["parameters"][0].replace(",", "").isdigit() and "vocabulary 1,000" in shown["parameters"][1]
    assert "step 220" in shown["layout"][1] and "at step 220" in shown["validation loss"][1]
    assert all(source for _, source in shown.values())


def test_the_pictures_show_every_window_in_its_share(adaptive: Path):
    run = read_run(adaptive)
    paths = dict(zip(PNGS, write_report(run)[1:], strict=True))
    palette = plots.Palette(run)
    assert palette.windows == WINDOWS
    # Each color fills a legend patch too, and thin white lines separate the heads.
    assert shares_drawn(paths["windows_end.png"], palette) == pytest.approx([0.5, 0.25, 0, 0.25], abs=0.02)
    lasted = np.diff(np.append(run.policy.steps, 220))
    over_time = [lasted @ (run.policy.windows == window).mean((1, 2)) / 220 for window in WINDOWS]
    assert shares_drawn(paths["windows_over_time.png"], palette) == pytest.approx(over_time, abs=0.02)


def test_colors_run_from_light_to_dark_and_full_is_darkest(tmp_path: Path):
    every = [1, 63, 64, 128, 200, 256, 400, 512]
    run = read_run(write_run(tmp_path / "run", 5, [{"step": 0, "windows": [every] * 3}]))
    palette = plots.Palette(run)
    assert palette.windows == every
    brightness = palette.colors.astype(float) @ [0.2126, 0.7152, 0.0722]
    assert (np.diff(brightness) < -5).all()
    one = read_run(write_run(tmp_path / "one", 5, FULL, aah__windows=[512]))
    assert plots.Palette(one).colors.tolist() == [palette.colors[-1].tolist()]


def test_head_blocks_are_set_apart(tmp_path: Path):
    white = {}
    for blocks in ("auto", 1, 4):
        folder = write_run(tmp_path / str(blocks), 5, FULL, aah__head_blocks=blocks)
        image = drawn(plots.windows_end, read_run(folder))
        row = image[int(0.7 * len(image))]  # through layer 0, below the legend
        white[blocks] = np.count_nonzero((row == 255).all(-1))
    assert white["auto"] == white[1] < white[4]


def test_layers_run_from_the_bottom_and_time_from_the_left(tmp_path: Path):
    windows = [[64] * 8, [512] * 8, [512] * 8]
    folder = write_run(tmp_path / "run", 100, [*FULL, {"step": 75, "windows": windows}])
    run = read_run(folder)
    light = plots.Palette(run).colors[0].astype(int)
    for draw, left in ((plots.windows_end, 0.05), (plots.windows_over_time, 0.5)):
        image = drawn(draw, run)
        height, width = image.shape[:2]
        y, x = np.nonzero((image == light).all(-1))
        in_map = y > 0.4 * height  # the legend is at the top
        assert in_map.any() and y[in_map].min() > 0.55 * height and x[in_map].min() > left * width


def test_a_run_that_starts_from_anothers_checkpoint_is_blank_before(tmp_path: Path):
    folder = write_run(tmp_path / "run", 100, FULL)
    write_lines(folder / "policy.jsonl", [{"step": 40, "windows": [[512] * 8] * 3}])
    run = read_run(folder)
    dark = (drawn(plots.windows_over_time, run) == plots.Palette(run).colors[-1].astype(int)).all(-1)
    row = np.flatnonzero(dark[int(0.8 * len(dark))])  # below the legend
    whole = plots.windows_over_time(read_run(write_run(tmp_path / "whole", 100, FULL))).axes[0].get_xlim()
    assert whole == (0, 100) and "in all 60 steps" in plots.windows_over_time(run).get_suptitle()
    assert row.min() > 0.3 * dark.shape[1]


@pytest.mark.parametrize("ablation", ["shuffle", "random_uniform"])
def test_a_regime_that_redraws_shows_raw_choices_and_says_so(ablation: str, tmp_path: Path):
    raw = {"step": 30, "ablation": ablation, "seed": 0, "raw": [[64] * 8, [128] * 8, [512] * 8]}
    run = read_run(write_run(tmp_path / "run", 40, [*FULL, raw], aah__ablation=ablation, **ADAPTIVE))
    assert run.policy.ablation == ablation and run.policy.steps.tolist() == [0, 30]
    shown = values(summary(run))
    assert f"redrawn each step by {ablation}" in shown["regime"][0]
    assert shown["raw choices recorded after the first"][0] == "1" and "changes of policy" not in shown
    assert "raw choices" in summary(run) and "no single map is in force" in summary(run)
    for draw in (plots.windows_end, plots.windows_over_time):
        title = draw(run).get_suptitle()
        assert title.startswith("Raw choices") and ablation in title


def test_a_running_run(tmp_path: Path):
    # The third line was decided after the last step that is done.
    policy = [*FULL, {"step": 49, "windows": [[64] * 8] * 3}, {"step": 50, "windows": [[128] * 8] * 3}]
    folder = write_run(tmp_path / "run", 50, policy, finished=False, evaluate=0, train__steps=400, **ADAPTIVE)
    for name, cut in (("metrics.jsonl", '{"step": 60, "train/lo'), ("policy.jsonl", '{"step": 55, "windows": [[6')):
        with open(folder / name, "a") as file:
            file.write(cut)
    run = read_run(folder)
    assert run.steps_done == 50 and run.policy.steps.tolist() == [0, 49]
    text = summary(run)
    shown = values(text)
    assert "Not finished: 50 of 400 steps recorded" in text
    assert shown["validation loss"][0] == "not recorded" and "validation perplexity" not in shown
    assert shown["layout"] == ("not recorded", "no complete checkpoint yet")
    assert shown["parameters"][0] == "not known"
    assert shown["unigram entropy of the held-out text"][0] == "not recorded"
    assert shown["decisions"][0] == "6"  # for steps 20, 25, ... 45
    assert "no validation yet" in plots.losses(run).get_suptitle()
    # One step is a column as high as the map.
    light = (drawn(plots.windows_over_time, run) == plots.Palette(run).colors[0].astype(int)).all(-1)
    assert light.any(1).mean() > 0.5


def test_entropy_and_vocabulary_come_from_the_data_only_if_it_is_the_runs(tmp_path: Path):
    folder = write_run(tmp_path / "run", 10, FULL, finished=False)
    data = folder / "no_data"
    data.mkdir()
    meta = {"text": {"fingerprint": "a"}, "tokenizer": {"vocab_size": 900}, "valid_unigram_entropy": 4.5}
    (data / "metadata.json").write_text(json.dumps(meta))
    run = read_run(folder)
    assert run.unigram_entropy[0] == 4.5 and run.vocab_size == 900
    (folder / "checkpoints" / "step_00000010").mkdir(parents=True)
    manifest = {"step": 10, "tp": 1, "dp": 1, "zero_stage": 0, "precision": "fp32", "text_fingerprint": "b"}
    (folder / "checkpoints" / "step_00000010" / "manifest.json").write_text(json.dumps(manifest))
    run = read_run(folder)
    assert run.unigram_entropy[0] is None and run.vocab_size is None


def test_nulls_and_a_run_without_a_first_line(tmp_path: Path):
    lines = {10: {"val/loss": 800.0, "val/ppl": None}, 9: {"train/loss": None, "aah/ACR": None}}
    folder = write_run(tmp_path / "run", 10, FULL, log=1, lines=lines)
    started, *rest = (folder / "metrics.jsonl").read_text().splitlines()
    assert "run/started" in started
    (folder / "metrics.jsonl").write_text("\n".join(rest))  # without the last line's end as well
    run = read_run(folder)
    shown = values(summary(run))
    assert shown["commit"][0] == "not recorded" and shown["seed"] == ("0", "config.yaml; weights, data order, dropout")
    assert shown["validation perplexity"][0] == "above 1e308"
    assert "mean over all steps done" in shown["ACR, mean over the run"][1]
    assert run.series("train/loss")[0].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 10]
    assert run.series("aah/ACR")[1].tolist() == [1.0] * 9


def test_gpu_memory_is_preferred(tmp_path: Path):
    lines = {10: {"perf/gpu_alloc_max_mb": 5000.0}, 1: {"perf/gpu_alloc_max_mb": 4000.0}}
    shown = values(summary(read_run(write_run(tmp_path / "run", 10, FULL, lines=lines))))
    assert shown["peak memory"][0] == "5,000 MiB" and "rank 0" in shown["peak memory"][1]


def test_only_nulls_still_make_a_report(tmp_path: Path):
    nothing = dict.fromkeys(("train/loss", "val/loss", "aah/ACR", "aah/exact_pair_ratio", "perf/tok_s",
                             "perf/cpu_rss_mb"))
    run = read_run(write_run(tmp_path / "run", 1, FULL, lines={1: nothing}))
    assert values(summary(run))["training loss"][0] == "not recorded"
    assert len(write_report(run)) == 5


def test_smoothing_is_a_centred_mean_that_keeps_lines_and_ends():
    line = np.linspace(3, 1, 31)
    assert plots.smooth(line, 4) == pytest.approx(line)
    bumps = np.array([0.0, 3.0, 0.0, 3.0, 0.0])
    assert plots.smooth(bumps, 1) == pytest.approx([0, 1, 2, 1, 0])


def broken_metrics(folder: Path) -> None:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    lines[1] = lines[1][:20]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")


MISUSE = {
    "no folder": (lambda folder: os.rename(folder, folder.with_name("away")), "is not a run's folder"),
    "no metrics": (lambda folder: (folder / "metrics.jsonl").unlink(), "it has no metrics.jsonl"),
    "no configuration": (lambda folder: (folder / "config.yaml").unlink(), "it has no config.yaml"),
    "nothing logged": (lambda folder: write_lines(folder / "metrics.jsonl", [{"step": 0, "run/started": 1}]),
                       "has no logged step yet"),
    "empty metrics": (lambda folder: (folder / "metrics.jsonl").write_text(""), "has no logged step yet"),
    "a broken line": (broken_metrics, "metrics.jsonl line 2 is not a JSON object"),
    "no step": (lambda folder: write_lines(folder / "policy.jsonl", [{"windows": FULL[0]["windows"]}, *FULL]),
                "policy.jsonl line 1 is not a JSON object with a step"),
    "no policy": (lambda folder: (folder / "policy.jsonl").write_text(""), "policy.jsonl holds no policy"),
    "other heads": (lambda folder: write_lines(folder / "policy.jsonl",
                                               [*FULL, {"step": 3, "windows": [[64] * 4] * 3}]),
                    "policy.jsonl line 2 does not hold one window for each of the 3 layers x 8 heads"),
    "other layers": (lambda folder: write_lines(folder / "policy.jsonl", [{"step": 0, "windows": [[64] * 8] * 2}]),
                     "policy.jsonl line 1 does not hold"),
    "uneven layers": (lambda folder: write_lines(folder / "policy.jsonl",
                                                 [{"step": 0, "windows": [[64] * 8, [64] * 8, [64]]}]),
                      "policy.jsonl line 1 does not hold"),
    "no windows": (lambda folder: write_lines(folder / "policy.jsonl", [{"step": 0}]), "policy.jsonl line 1 does not"),
}


@pytest.mark.parametrize("case", MISUSE)
def test_bad_input_is_one_sentence(case: str, tmp_path: Path):
    spoil, expected = MISUSE[case]
    folder = write_run(tmp_path / "run", 10, FULL)
    spoil(folder)
    with pytest.raises(ConfigError) as error:
        read_run(folder)
    text = str(error.value)
    assert expected in text and text.endswith(".") and "\n" not in text


def test_misuse_exits_with_code_2(tmp_path: Path):
    done = command(tmp_path)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path):
    folder = write_run(tmp_path / "run", 10, FULL)
    (folder / "summary.md").mkdir()
    with pytest.raises(ConfigError, match="cannot be written"):
        write_report(read_run(folder))


class Job:
    """Stands in for the launcher: the demo's `run` that finishes some runs and exits with a code."""

    def __init__(self, code: int, *finished: Path) -> None:
        self.code, self.finished = code, finished

    def __call__(self, argv: list[str], environment: dict[str, str]) -> int:
        for folder in self.finished:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "finished.json").write_text("{}")
        return self.code


@pytest.fixture
def start_demo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """(job, *arguments) -> the demo's exit code and the folders it reported, in an empty working directory."""
    monkeypatch.chdir(tmp_path)
    reported = []
    monkeypatch.setattr(demo, "report", lambda folder: reported.append(folder) or 0)

    def start(job: Job, *arguments: str) -> tuple[int, list[Path]]:
        monkeypatch.setattr(sys, "argv", ["demo", *arguments])
        monkeypatch.setattr(demo, "run", job)
        return demo.main(), reported

    return start


def test_the_demo_reports_the_run_it_finished(start_demo):
    old = Path("runs/demo")
    Job(0, old)([], {})
    os.utime(old / "finished.json", ns=(2**62, 2**62))  # however new it looks, it was there before
    assert start_demo(Job(0, Path("runs/demo-2"))) == (0, [Path("runs/demo-2")])


@pytest.mark.parametrize("arguments", [["--output_dir", "else/where"], ["--output_dir=else/where"]])
def test_the_demo_reports_a_run_elsewhere(start_demo, arguments: list[str]):
    assert start_demo(Job(0, Path("else/where")), "--train.steps", "20", *arguments) == (0, [Path("else/where")])


def test_the_demo_reports_an_extended_run(start_demo):
    Job(0, Path("runs/demo"))([], {})
    os.utime("runs/demo/finished.json", ns=(1, 1))
    assert start_demo(Job(0, Path("runs/demo"))) == (0, [Path("runs/demo")])


@pytest.mark.parametrize("code", [0, 1, 75])
def test_the_demo_reports_nothing_when_nothing_finished(start_demo, code: int):
    Job(0, Path("runs/demo"))([], {})
    assert start_demo(Job(code)) == (code, [])


def test_a_failing_report_is_shown_and_gives_the_demos_exit_code(tmp_path: Path, capfd: pytest.CaptureFixture):
    assert demo.report(tmp_path) == 2
    shown = capfd.readouterr().err
    assert "error: " in shown and "finished and intact; its report failed with exit code 2" in shown
