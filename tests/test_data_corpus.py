"""Finding text, cutting it into documents, holding some out, and the order rows are trained in."""

import gzip
import json
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from aah_dist.config.schema import ConfigError
from aah_dist.data import corpus
from aah_dist.data.corpus import documents, find_files, read_blocks
from aah_dist.data.sampler import SampleOrder, micro_batch_ids
from aah_dist.data.split import choose_valid


def texts(entries, one_document_per="file", json_key="text"):
    blocks = read_blocks(find_files([str(entry) for entry in entries]), one_document_per)
    return [text for block in blocks for text in documents(block, json_key)]


def test_folders_globs_and_files_are_read_once_in_the_order_of_names(tmp_path):
    for name in ("b.txt", "a/z.txt", "a/y.txt", "a-c.txt", ".hidden", ".git/x"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert texts([tmp_path]) == ["a/y.txt", "a/z.txt", "a-c.txt", "b.txt"]
    assert texts([tmp_path / "**/*.txt"]) == ["a/y.txt", "a/z.txt", "a-c.txt", "b.txt"]
    assert texts([tmp_path / "b.txt", tmp_path]) == ["b.txt", "a/y.txt", "a/z.txt", "a-c.txt"]


def test_documents_of_files_lines_gz_and_jsonl(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "BLOCK_BYTES", 7)  # many blocks, cut between lines only
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\n\n  \ntwo \xc3\xa9\x0b\x0cx\nlast")
    with gzip.open(tmp_path / "b.txt.gz", "wt", newline="") as stream:
        stream.write("three\nfour\n")
    records = [json.dumps({"body": "f\nive", "n": 1}), "", json.dumps({"body": "\U0001f600"}),
               json.dumps({"body": " "})]
    (tmp_path / "c.jsonl").write_text("\n".join(records))
    with gzip.open(tmp_path / "d.jsonl.gz", "wt") as stream:
        stream.write(records[0])
    as_json = ["f\nive", "\U0001f600", "f\nive"]
    assert texts([tmp_path], json_key="body") == ["one\r\n\n  \ntwo \xe9\x0b\x0cx\nlast", "three\nfour\n", *as_json]
    assert texts([tmp_path], "line", "body") == ["one", "two \xe9\x0b\x0cx", "last", "three", "four", *as_json]


def test_block_size_does_not_change_the_documents(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("\n".join("x" * i for i in range(60)))
    (tmp_path / "b.txt").write_text("tail")
    found = {}
    for size in (1, 100, 1 << 20):
        monkeypatch.setattr(corpus, "BLOCK_BYTES", size)
        found[size] = (texts([tmp_path], "line"), texts([tmp_path], "file"))
    assert found[1] == found[100] == found[1 << 20] and len(found[1][0]) == 60


def test_stdlib_has_source_and_no_tests():
    root = Path(sysconfig.get_paths()["stdlib"])
    names = {path.relative_to(root).as_posix() for path in find_files(["stdlib"])}
    assert {"ast.py", "json/decoder.py", "unittest/mock.py"} <= names
    assert not [name for name in names if not name.endswith(".py") or "/site-packages/" in f"/{name}"
                or "/test/" in f"/{name}" or "/tests/" in f"/{name}"]


@pytest.mark.parametrize(("name", "content", "words"), [
    ("a.txt", b"fine\nbad \xff byte", "a.txt is not valid UTF-8 in line 2"),
    ("a.jsonl", b'{"text": "x"}\n{"text": ', "line 2 of .*a.jsonl is not JSON"),
    ("a.jsonl", b'{"body": "x"}', "no text under the key 'text' .its keys: 'body'"),
    ("a.jsonl", b'{"text": 3}', "no text under the key 'text'"),
    ("a.jsonl", b'[1]', "it is no object"),
    ("a.jsonl", b'{"text": "\\ud800"}', "surrogate"),
    ("a.txt.gz", b"not compressed", "a.txt.gz cannot be read"),
    ("a.txt.gz", gzip.compress(b"cut off" * 1000)[:-9], "a.txt.gz cannot be read"),
])
def test_bad_text_is_named(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        texts([tmp_path / name])


def test_text_that_is_not_there_is_named(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"link cannot be read \(No such file"):
        texts([tmp_path / "link"])
    with pytest.raises(ConfigError, match=r"nothing.txt' matches no file"):
        texts([tmp_path / "nothing.txt"])


def keys_of(count, seed=0):
    return np.random.default_rng(seed).integers(0, 1 << 63, count).astype(np.uint64)


def test_held_out_share_is_near_the_fraction_despite_a_huge_document():
    for seed in range(20):
        sizes = np.random.default_rng(seed).integers(1, 40_000, 500)
        sizes[7] = 1_000_000
        valid = choose_valid(sizes, keys_of(500, seed), 0.03)
        assert not valid[7]
        assert sizes[valid].sum() / sizes.sum() == pytest.approx(0.03, rel=0.15)
        assert valid.sum() >= 10


def test_equal_documents_stay_on_one_side():
    keys = np.repeat(keys_of(40), 3)
    valid = choose_valid(np.full(120, 10), keys, 0.2).reshape(40, 3)
    assert (valid.all(axis=1) | ~valid.any(axis=1)).all() and valid.any()


@pytest.mark.parametrize(("sizes", "fraction", "side"), [([100], 0.03, "validation"), ([50, 50], 0.03, "validation"),
                                                         ([100], 0.9, "training")])
def test_an_empty_split_is_refused(sizes, fraction, side):
    with pytest.raises(ConfigError, match=f"leaves the {side} split empty"):
        choose_valid(np.array(sizes), keys_of(len(sizes)), fraction)


def test_each_epoch_is_its_own_permutation_of_all_rows():
    order = SampleOrder(7, seed=3)
    epochs = [[order.row(7 * epoch + i) for i in range(7)] for epoch in range(4)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    assert [SampleOrder(7, seed=3).row(k) for k in (20, 3)] == [order.row(20), order.row(3)]
    assert epochs[0] != [SampleOrder(7, seed=4).row(k) for k in range(7)]


def test_the_order_is_pinned():
    assert [SampleOrder(10, seed=0).row(k) for k in range(12)] == [3, 2, 1, 8, 6, 0, 7, 4, 5, 9, 7, 4]


@pytest.mark.parametrize(("dp_size", "micro_batch_size"), [(1, 1), (1, 6), (2, 3), (3, 2), (6, 2), (4, 3)])
def test_a_step_takes_the_same_samples_in_every_layout(dp_size, micro_batch_size):
    batch = 12
    micros = batch // (dp_size * micro_batch_size)
    ids = [k for micro in range(micros) for rank in range(dp_size)
           for k in micro_batch_ids(5, micro, rank, dp_size, micro_batch_size, batch)]
    assert ids == list(range(60, 72))
    with pytest.raises(ValueError, match="outside the global batch"):
        micro_batch_ids(5, micros, 0, dp_size, micro_batch_size, batch)
