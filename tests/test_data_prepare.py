"""Preparing a folder, alone and beside other jobs, and opening it."""

import gzip
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from aah_dist.config.schema import ConfigError
from aah_dist.data import corpus
from aah_dist.data import prepare as prepare_module
from aah_dist.data.dataset import PreparedData, TokenRows, check_tokenizer
from aah_dist.data.prepare import prepare
from aah_dist.data.token_writer import TokenWriter, token_dtype
from aah_dist.data.tokenizer import load_tokenizer

SCRIPT = Path(prepare_module.__file__).resolve().parents[1] / "prepare_data.py"
WORDS = ["strong", "plain", "green", "tea", "pool", "string", "sky", "ground", "point", "top", "ink", "sleep"]


def write_text(folder, files=30, seed=0):
    rng = np.random.default_rng(seed)
    folder.mkdir()
    for i in range(files):
        lines = [" ".join(rng.choice(WORDS, 9)) for _ in range(rng.integers(5, 40))]
        (folder / f"{i:03}.txt").write_text("\n".join(lines) + "\n")
    (folder / "empty.txt").write_text("\n")
    return folder


def make(text, out, tokenizer="sentencepiece-bpe:300", **options):
    options = {"valid_fraction": 0.1, "workers": 2, "progress": False, **options}
    return prepare([str(text)], tokenizer, out, **options)


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text") / "files")


@pytest.fixture(scope="module")
def prepared(text, tmp_path_factory):
    return make(text, tmp_path_factory.mktemp("prepared") / "data")


def test_every_document_is_in_one_split_and_ends_with_eod(text, prepared):
    data = PreparedData(prepared)
    tokenizer = load_tokenizer(data.tokenizer_path)
    wanted = sorted(path.read_text() for path in text.glob("0*.txt"))
    found = []
    for name in ("train", "valid"):
        split = IndexedDataset(str(prepared / name))
        assert len(split) == len(split.document_indices) - 1 == data.meta["splits"][name]["documents"] > 0
        for document in split:
            assert document[-1] == data.eod_id and data.eod_id not in document[:-1]
            found.append(tokenizer.decode(document[:-1].tolist()))
    assert sorted(found) == wanted
    assert data.meta["text"]["documents"] == 30
    assert data.meta["text"]["characters"] == sum(map(len, wanted))
    share = data.meta["splits"]["valid"]["characters"] / data.meta["text"]["characters"]
    assert share == pytest.approx(0.1, abs=0.04)


def test_valid_unigram_entropy_is_that_of_the_file(prepared):
    counts = np.bincount(np.fromfile(prepared / "valid.bin", dtype=np.uint16))
    p = counts[counts > 0] / counts.sum()
    assert PreparedData(prepared).valid_unigram_entropy == pytest.approx(-(p * np.log(p)).sum())


def test_rows_cut_the_stream_with_one_token_shared(prepared):
    stream = np.fromfile(prepared / "train.bin", dtype=np.uint16).astype(np.int64)
    for seq_length in (1, 7, 64, len(stream) - 1):
        rows = PreparedData(prepared).split("train", seq_length)
        assert len(rows) == (len(stream) - 1) // seq_length
        for row in {0, len(rows) // 2, len(rows) - 1}:
            assert rows[row].dtype == np.int64
            assert np.array_equal(rows[row], stream[row * seq_length:row * seq_length + seq_length + 1])
    for row in (-1, len(rows)):
        with pytest.raises(IndexError):
            rows[row]
    with pytest.raises(ConfigError, match=f"seq_length {len(stream)} is above what"):
        PreparedData(prepared).split("train", len(stream))


@pytest.mark.parametrize("one_document_per", ["file", "line"])
def test_workers_and_blocks_leave_no_trace(text, tmp_path, monkeypatch, one_document_per):
    made = {}
    for workers, block_bytes in ((1, 1 << 20), (3, 500)):
        monkeypatch.setattr(corpus, "BLOCK_BYTES", block_bytes)
        out = make(text, tmp_path / f"{workers}", workers=workers, one_document_per=one_document_per)
        made[workers] = files_of(out)
    assert made[1] == made[3]


def test_the_split_follows_the_seed_and_not_the_names_of_files(text, tmp_path):
    renamed = tmp_path / "renamed"
    renamed.mkdir()
    for path in text.iterdir():
        (renamed / f"{path.stat().st_size}-{path.name}").write_bytes(path.read_bytes())
    model = make(text, tmp_path / "a") / "tokenizer.model"
    valid = {}
    for name, source, seed in (("same", text, 0), ("renamed", renamed, 0), ("other", text, 1)):
        split = IndexedDataset(str(make(source, tmp_path / f"out-{name}", str(model), seed=seed) / "valid"))
        valid[name] = {document.tobytes() for document in split}
    assert valid["same"] == valid["renamed"] != valid["other"]


def test_line_documents_from_a_gz_file(tmp_path, prepared):
    lines = [f"{word} {i}" for i, word in enumerate(WORDS * 5)]
    with gzip.open(tmp_path / "lines.txt.gz", "wt") as stream:
        stream.write("\n\n".join(lines))
    out = make(tmp_path / "lines.txt.gz", tmp_path / "out", str(prepared / "tokenizer.model"), one_document_per="line")
    assert PreparedData(out).meta["text"]["documents"] == 60


def test_preparing_again_does_nothing_and_says_so(text, prepared, capsys):
    before = {path.name: path.stat().st_mtime_ns for path in prepared.iterdir()}
    assert make(text, prepared, progress=True) == prepared
    assert "already holds this text and tokenizer; nothing to do" in capsys.readouterr().out
    assert {path.name: path.stat().st_mtime_ns for path in prepared.iterdir()} == before


@pytest.mark.parametrize(("change", "words"), [
    ({"text": "other"}, "made with text sha256"),
    ({"tokenizer": "sentencepiece-unigram:300"}, "tokenizer sentencepiece-bpe:300, not sentencepiece-unigram:300"),
    ({"valid_fraction": 0.2}, "valid_fraction 0.1, not 0.2"),
    ({"seed": 5}, "seed 0, not 5"),
])
def test_a_folder_of_other_data_is_refused_and_kept(text, prepared, tmp_path, change, words):
    before = files_of(prepared)
    source = write_text(tmp_path / "other", seed=9) if "text" in change else text
    with pytest.raises(ConfigError, match=words):
        make(source, prepared, **{name: value for name, value in change.items() if name != "text"})
    assert files_of(prepared) == before


def test_foreign_folders_and_files_are_not_touched(text, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(ConfigError, match=r"mine holds no metadata.json"):
        make(text, tmp_path / "mine")
    with pytest.raises(ConfigError, match=r"thesis.tex is a file"):
        make(text, tmp_path / "mine" / "thesis.tex")
    with pytest.raises(ConfigError, match="lies inside the text folder"):
        make(text, text / "out")
    assert files_of(tmp_path / "mine") == {"thesis.tex": b"x"}
    (tmp_path / "vacant").mkdir()
    assert PreparedData(make(text, tmp_path / "vacant"))


@pytest.mark.parametrize(("options", "words"), [
    ({"valid_fraction": 0}, "valid_fraction is 0"), ({"valid_fraction": 1.5}, "valid_fraction is 1.5"),
    ({"workers": 0}, "workers is 0"), ({"seed": -1}, "seed is -1"),
    ({"one_document_per": "page"}, "one_document_per is 'page'"),
    ({"tokenizer": "absent"}, "tokenizer absent does not exist"),
    ({"tokenizer": "sentencepiece-bpe:90000"}, "text fills a vocabulary of at most"),
    ({"valid_fraction": 1e-9}, "leaves the validation split empty"),
])
def test_bad_arguments_leave_nothing(text, tmp_path, options, words):
    with pytest.raises(ConfigError, match=words):
        make(text, tmp_path / "out", **options)
    assert [path.name for path in tmp_path.iterdir() if path.name != ".out.lock"] == []


def test_empty_text_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text(" \n\n")
    with pytest.raises(ConfigError, match="holds no documents"):
        make(tmp_path / "a.txt", tmp_path / "out")


def test_bad_text_is_named_from_a_worker(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"a.txt is not valid UTF-8 in line 1"):
        make(tmp_path / "a.txt", tmp_path / "out")


def test_a_full_disk_is_one_sentence_and_leaves_nothing(text, prepared, tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    model = prepared / "tokenizer.model"
    assert model.stat().st_size < (prepared / "train.bin").stat().st_size - 1
    resource.setrlimit(resource.RLIMIT_FSIZE, (model.stat().st_size + 1, limits[1]))
    try:
        with pytest.raises(ConfigError, match=r"out cannot be written \(File too large\); free some space"):
            make(text, tmp_path / "out", str(model))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in tmp_path.iterdir()] == [".out.lock"]


def test_text_that_changes_meanwhile_is_noticed(tmp_path, prepared, monkeypatch):
    source = write_text(tmp_path / "text")

    def place_and_change(*arguments):
        with open(source / "011.txt", "a") as stream:
            stream.write("more")
        return placed(*arguments)

    placed = prepare_module._place_tokenizer
    monkeypatch.setattr(prepare_module, "_place_tokenizer", place_and_change)
    with pytest.raises(ConfigError, match="changed while it was being prepared"):
        make(source, tmp_path / "out", str(prepared / "tokenizer.model"))
    assert not (tmp_path / "out").exists()


def start_job(text, out):
    return subprocess.Popen([sys.executable, str(SCRIPT), str(text), "--output_dir", str(out), "--workers", "2",
                             "--tokenizer", "sentencepiece-bpe:300", "--valid_fraction", "0.1"],
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_killed_job_leaves_no_folder_and_two_jobs_at_once_both_succeed(text, prepared, tmp_path):
    out = tmp_path / "out"
    killed = start_job(text, out)
    deadline = time.monotonic() + 60
    while not (tmp_path / ".out.partial" / "tokenizer.model").exists():
        assert killed.poll() is None and time.monotonic() < deadline, killed.communicate()
        time.sleep(0.01)
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate()  # returns only when the workers, which hold the pipes too, have gone
    assert not out.exists()
    (tmp_path / ".out.partial" / "junk").write_text("left over")

    jobs = [start_job(text, out) for _ in range(2)]
    outputs = [job.communicate(timeout=120) for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], outputs
    printed = [stdout for stdout, _ in outputs]
    assert sorted("nothing to do" in stdout for stdout in printed) == [False, True]
    assert sum("identical" in stdout for stdout in printed) == 1
    assert [stderr for _, stderr in outputs] == ["", ""]
    assert files_of(out) == files_of(prepared)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.lock", "out"]


def test_the_script_answers_misuse_with_one_sentence(text):
    for arguments in ([str(text)], ["nowhere/*.txt", "--output_dir", "x"]):
        done = subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


@pytest.fixture
def copy(prepared, tmp_path):
    for name, content in files_of(prepared).items():
        (tmp_path / name).write_bytes(content)
    return tmp_path


@pytest.mark.parametrize("name", ["train.bin", "train.idx", "valid.bin", "valid.idx", "metadata.json",
                                  "tokenizer.model"])
def test_missing_empty_and_cut_files_are_named(copy, name):
    whole = (copy / name).read_bytes()
    for content in (whole[:-1], whole[:20], whole + b"\0", b"", None):
        (copy / name).unlink(missing_ok=True)
        if content is not None:
            (copy / name).write_bytes(content)
        if name == "metadata.json" and content in (whole[:-1], whole):
            continue  # only the last newline is gone
        with pytest.raises(ConfigError, match=name.removesuffix(".model")):
            PreparedData(copy)


@pytest.mark.parametrize(("change", "words"), [
    ({"format": 99}, "format"), ({"tokenizer": {}}, "vocab_size"), ({"splits": {"train": {"tokens": 5}}}, "valid"),
    ({"splits": {"train": {"tokens": 5}, "valid": {"tokens": 5}}}, "counts [0-9]+ tokens where metadata.json says 5"),
    ({"valid_unigram_entropy": "x"}, "usable"),
])
def test_bad_metadata_is_named(copy, change, words):
    meta = json.loads((copy / "metadata.json").read_text())
    (copy / "metadata.json").write_text(json.dumps({**meta, **change}))
    with pytest.raises(ConfigError, match=words):
        PreparedData(copy)


def test_what_is_no_prepared_folder_is_named(tmp_path):
    for path, words in ((tmp_path / "absent", "is not a folder"), (tmp_path, "holds no metadata.json")):
        with pytest.raises(ConfigError, match=words):
            PreparedData(path)


def test_another_tokenizer_than_the_datas_is_refused(text, prepared, tmp_path):
    data = PreparedData(prepared)
    check_tokenizer(data, prepared / "tokenizer.model")
    other = make(text, tmp_path / "other", "sentencepiece-bpe:301")
    with pytest.raises(ConfigError, match="is not the tokenizer that"):
        check_tokenizer(data, other / "tokenizer.model")
    with pytest.raises(ConfigError, match="does not exist"):
        check_tokenizer(data, tmp_path / "absent")


def test_large_vocabularies_are_int32(tmp_path):
    assert [token_dtype(size) for size in (4096, 65499, 65500, 128_000)] == [np.uint16, np.uint16, np.int32, np.int32]
    writer = TokenWriter(tmp_path / "train", 128_000)
    tokens = np.array([5, 127_999, 70_000, 1], dtype=np.int32)
    writer.add(tokens, np.array([3, 1]))
    writer.finish()
    split = IndexedDataset(str(tmp_path / "train"))
    assert [document.tolist() for document in split] == [[5, 127_999, 70_000], [1]]
    assert writer.tokens == 4 and writer.unigram_entropy() == pytest.approx(np.log(4))
    rows = TokenRows(np.memmap(tmp_path / "train.bin", dtype=np.int32, mode="r"), 2, "train.bin")
    assert rows[0].tolist() == [5, 127_999, 70_000]


def test_given_validation_text_is_what_is_held_out(text, prepared, tmp_path):
    held_out = write_text(tmp_path / "held_out", files=3, seed=9)
    tokenizer = str(PreparedData(prepared).tokenizer_path)
    data = PreparedData(make(text, tmp_path / "data", tokenizer=tokenizer, valid_text=[str(held_out)]))
    assert data.meta["splits"]["train"]["documents"] == 30 and data.meta["splits"]["valid"]["documents"] == 3
    alone = load_tokenizer(data.tokenizer_path)
    texts = [path.read_text() for path in sorted(held_out.glob("0*.txt"))]
    expected = [token for text in texts for token in [*alone.encode(text), data.eod_id]]
    assert np.fromfile(tmp_path / "data" / "valid.bin", dtype=np.uint16).tolist() == expected


def test_text_given_for_both_splits_is_refused(text, tmp_path):
    with pytest.raises(ConfigError, match=r"000\.txt is given as training and as validation text"):
        make(text, tmp_path / "data", valid_text=[str(text / "000.txt")])


def test_the_scripts_defaults_are_the_demos_data():
    """Preparing the standard library by hand and then running the demo must fit together."""
    from aah_dist.config.load import load_config

    shown = subprocess.run([sys.executable, str(SCRIPT), "--help"], capture_output=True, text=True, check=True).stdout
    demo = load_config("demo").data
    assert f"(default: {demo.tokenizer})" in " ".join(shown.split()) and demo.path == "data/stdlib"
