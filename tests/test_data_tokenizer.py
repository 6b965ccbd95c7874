"""Tokenizers: trained, given, and unfit ones."""

import io
import json

import numpy as np
import pytest
import sentencepiece

from aah_dist.config.schema import ConfigError
from aah_dist.data import train_tokenizer
from aah_dist.data.tokenizer import copy_tokenizer, load_tokenizer, tokenizer_fingerprint
from aah_dist.data.train_tokenizer import parse_spec, sample_documents, train_sentencepiece

AWKWARD = "  def f(x):\n\treturn '\xe9\U0001f600'  # <|endoftext|> </s>\r\n\n   end \x00 1234 "
WORDS = [f"{a}{b}{c}" for a in ("str", "pl", "gr", "t") for b in ("a", "ee", "oo", "i")
         for c in ("ng", "nt", "p", "sk")]


def words_text(seed, count=3000):
    return " ".join(np.random.default_rng(seed).choice(WORDS, count))


def write_gpt2_files(folder):
    from tokenizers.pre_tokenizers import ByteLevel

    folder.mkdir()
    pieces = [*sorted(ByteLevel.alphabet()), "th", "the", "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({piece: i for i, piece in enumerate(pieces)}))
    (folder / "merges.txt").write_text("#version: 0.2\nt h\nth e\n")
    return folder


@pytest.mark.parametrize("model_type", ["unigram", "bpe"])
def test_a_trained_model_is_lossless_repeatable_and_never_makes_eod_from_text(tmp_path, model_type):
    for name in ("a", "b"):
        train_sentencepiece([words_text(0)], model_type, 310, tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    tokenizer = load_tokenizer(tmp_path / "a")
    assert (tokenizer.vocab_size, tokenizer.eod_id, tokenizer.eod_piece) == (310, 1, "<|endoftext|>")
    for text in (AWKWARD, words_text(1, 50), ""):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.eod_id not in ids
        assert tokenizer.encode_array(text).tolist() == ids
    assert len(tokenizer.encode(words_text(1, 50))) < len(words_text(1, 50)) / 2


def test_long_lines_are_trained_on(tmp_path):
    train_sentencepiece([words_text(0, 20_000).replace("\n", " ")], "bpe", 320, tmp_path / "m")
    assert len(load_tokenizer(tmp_path / "m").encode("streeng gront")) < 10


@pytest.mark.parametrize("spec", ["sentencepiece-bpe", "sentencepiece-word:4096",
                                  "sentencepiece-bpe:12", "sentencepiece-bpe:-5"])
def test_a_bad_spec_is_refused(spec):
    with pytest.raises(ConfigError, match="SIZE of at least 300"):
        parse_spec(spec)


def test_specs_and_paths_are_told_apart():
    assert parse_spec("sentencepiece-unigram:4096") == ("unigram", 4096)
    assert parse_spec("some/folder") is None


@pytest.mark.parametrize("model_type", ["unigram", "bpe"])
def test_a_vocabulary_that_the_text_cannot_fill_is_refused(tmp_path, model_type):
    with pytest.raises(ConfigError, match=f"sentencepiece-{model_type}:9000 does not fit this text; .* at most [0-9]+"):
        train_sentencepiece([words_text(0)], model_type, 9000, tmp_path / "m")


def test_the_sample_is_bounded_and_allowed(monkeypatch):
    monkeypatch.setattr(train_tokenizer, "SAMPLE_CHARACTERS", 1000)
    monkeypatch.setattr(train_tokenizer, "DOCUMENT_CHARACTERS", 50)
    keys = np.arange(200, dtype=np.uint64)
    allowed = np.arange(200) % 2 == 0
    chosen = sample_documents(np.full(200, 90), keys, allowed)
    assert not chosen[~allowed].any() and chosen.sum() == 20 and chosen[198] and not chosen[0]
    assert sample_documents(np.full(200, 3), keys, allowed).sum() == 100


def sentencepiece_file(path, **special):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(words_text(0).split()), model_writer=model,
                                             vocab_size=40, minloglevel=2, **special)
    path.write_bytes(model.getvalue())
    return path


def test_a_given_model_with_other_special_ids(tmp_path):
    tokenizer = load_tokenizer(sentencepiece_file(tmp_path / "m", pad_id=0, unk_id=1, bos_id=2, eos_id=3))
    assert (tokenizer.eod_id, tokenizer.eod_piece, tokenizer.vocab_size) == (3, "</s>", 40)


def test_an_absent_eos_is_not_taken_for_token_minus_one(tmp_path):
    with pytest.raises(ConfigError, match="no end-of-document token"):
        load_tokenizer(sentencepiece_file(tmp_path / "m", eos_id=-1))
    # Text can spell a user-defined symbol, so it cannot end documents.
    with pytest.raises(ConfigError, match="no end-of-document token"):
        load_tokenizer(sentencepiece_file(tmp_path / "m", eos_id=-1, user_defined_symbols=["<|endoftext|>"]))
    found = load_tokenizer(sentencepiece_file(tmp_path / "m", eos_id=-1, control_symbols=["<|endoftext|>"]))
    assert found.eod_piece == "<|endoftext|>" and found.eod_id >= 0


def test_gpt2_files_and_saved_folders(tmp_path):
    from transformers import AutoTokenizer, GPT2TokenizerFast

    bare = write_gpt2_files(tmp_path / "bare")
    saved = tmp_path / "saved"
    GPT2TokenizerFast.from_pretrained(str(bare)).save_pretrained(str(saved))
    (saved / "model.safetensors").write_bytes(b"weights")
    for folder in (bare, saved):
        tokenizer = load_tokenizer(folder)
        assert (tokenizer.vocab_size, tokenizer.eod_id) == (259, 258)
        ids = tokenizer.encode(AWKWARD)
        assert tokenizer.decode(ids) == AWKWARD and tokenizer.eod_id not in ids
        assert tokenizer.encode("the") == [257]
        (tmp_path / f"prepared-{folder.name}").mkdir()
        copy = copy_tokenizer(folder, tmp_path / f"prepared-{folder.name}")
        assert tokenizer_fingerprint(copy) == tokenizer.fingerprint
        assert load_tokenizer(copy).encode(AWKWARD) == ids
        assert not (copy / "model.safetensors").exists()
    assert AutoTokenizer.from_pretrained(str(copy), local_files_only=True).eos_token_id == 258


def test_what_is_no_tokenizer_is_named(tmp_path):
    (tmp_path / "x.model").write_bytes(b"nonsense")
    (tmp_path / "folder").mkdir()
    for path, words in (("x.model", "not a sentencepiece model"), ("folder", "not a Hugging Face tokenizer folder"),
                        ("absent", "does not exist")):
        with pytest.raises(ConfigError, match=words) as caught:
            load_tokenizer(tmp_path / path)
        assert "\n" not in str(caught.value)
