"""Text to a folder of tokens, train and validation, that PreparedData opens.

The text is read once for counts, fingerprint and split and once to encode it. What is written is a function of the
text, the tokenizer, valid_fraction and seed; the number of workers shows nowhere in it.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version
from pathlib import Path

import numpy as np
from tqdm import tqdm

from aah_dist.config.schema import ConfigError
from aah_dist.data.dataset import FORMAT, METADATA, SPLITS, PreparedData
from aah_dist.data.folder import appearing_whole, exclusive
from aah_dist.data.source import Contents, Source
from aah_dist.data.split import choose_valid
from aah_dist.data.token_writer import TokenWriter, load_builder, token_dtype
from aah_dist.data.tokenizer import Tokenizer, copy_tokenizer, load_tokenizer
from aah_dist.data.train_tokenizer import DOCUMENT_CHARACTERS, parse_spec, sample_documents, train_sentencepiece
from aah_dist.data.workers import Workers

Say = Callable[[str], None]


def prepare(text: list[str], tokenizer: str, out_dir: Path, *, valid_fraction: float, seed: int = 0, workers: int,
            json_key: str = "text", one_document_per: str = "file", valid_text: list[str] | None = None,
            progress: bool = True) -> Path:
    """Make `out_dir` from `text`, or find that it already holds just that; return it.

    text: files, folders, globs, or "stdlib". tokenizer: sentencepiece-unigram:SIZE, sentencepiece-bpe:SIZE, a .model
    file or a Hugging Face folder. valid_fraction: share of the characters held out, by whole documents,
    chosen by the seed; valid_text, given like text, is held out instead and valid_fraction not used.
    progress: print, with a progress bar on a terminal. Raises ConfigError for text, tokenizer or folder that cannot
    work; nothing has appeared at `out_dir` then. Any number of jobs may call this at once for one folder.
    """
    started = time.monotonic()
    say: Say = (lambda line: print(line, flush=True)) if progress else (lambda line: None)
    out_dir = Path(os.path.abspath(out_dir))
    _check_arguments(text, out_dir, valid_fraction, seed, workers, one_document_per)
    spec = parse_spec(tokenizer)
    given = None if spec else load_tokenizer(Path(tokenizer))
    source = Source.find(text, one_document_per, json_key, valid_text)
    with Workers(workers) as pool:
        scans = pool.scan(source.blocks(), json_key, seed)
        contents = Contents.collect(_bar(scans, "reading", "block", progress))
        request = {"text": contents.fingerprint, "tokenizer": given.fingerprint if given else tokenizer,
                   "valid_fraction": None if valid_text else valid_fraction, "seed": None if valid_text else seed,
                   "valid_documents": int(contents.held_out.sum()) if valid_text else None}
        if _occupied(out_dir):
            return _already_made(out_dir, request, say)
        if valid_text:
            valid = _given_valid(contents)
        else:
            valid = choose_valid(contents.characters, contents.keys, valid_fraction)
        say(f"text       {', '.join(text)}: {len(valid):,} documents, {contents.characters.sum():,} characters, "
            f"sha256 {contents.fingerprint[:16]}")
        try:
            with exclusive(out_dir, lambda: say(f"waiting for another job that prepares {out_dir}")):
                if _occupied(out_dir):
                    return _already_made(out_dir, request, say)
                with appearing_whole(out_dir) as partial:
                    model = _place_tokenizer(partial, tokenizer, spec, source, contents, valid, say)
                    splits, entropy = encode_splits(partial, model, source, contents, valid, pool, progress)
                    _write_metadata(partial, text, source, contents, request, model, splits, entropy)
        except OSError as error:
            raise ConfigError(f"output folder {out_dir} cannot be written ({error.strerror or error}); free some space "
                              "or choose another; nothing was left behind.") from error
    _report(PreparedData(out_dir), source, say)
    say(f"prepared {out_dir} in {time.monotonic() - started:.0f} s")
    return out_dir


def _check_arguments(text: list[str], out_dir: Path, valid_fraction: float, seed: int, workers: int,
                     one_document_per: str) -> None:
    if not text:
        raise ConfigError("text is empty; give files, folders, globs, or stdlib.")
    if not 0 < valid_fraction < 1:
        raise ConfigError(f"valid_fraction is {valid_fraction}; it must lie between 0 and 1.")
    if seed < 0:
        raise ConfigError(f"seed is {seed}; it must be at least 0.")
    if workers < 1:
        raise ConfigError(f"workers is {workers}; it must be at least 1.")
    if one_document_per not in ("file", "line"):
        raise ConfigError(f"one_document_per is {one_document_per!r}; it must be file or line.")
    for entry in text:
        if os.path.isdir(entry) and Path(os.path.realpath(out_dir)).is_relative_to(os.path.realpath(entry)):
            raise ConfigError(f"output folder {out_dir} lies inside the text folder {entry}; choose one outside of it.")


def _given_valid(contents: Contents) -> np.ndarray:
    if contents.held_out.all() or not contents.held_out.any():
        side = "training" if contents.held_out.all() else "validation"
        raise ConfigError(f"the {side} text holds no documents: every file or line is empty.")
    return contents.held_out


def _occupied(folder: Path) -> bool:
    try:
        return any(folder.iterdir())
    except FileNotFoundError:
        return False
    except NotADirectoryError as error:
        raise ConfigError(f"output folder {folder} is a file; choose another.") from error


def _already_made(out_dir: Path, request: dict, say: Say) -> Path:
    made = PreparedData(out_dir).meta["request"]
    differing = [name for name in request if made[name] != request[name]]
    if differing:
        name = differing[0]
        raise ConfigError(f"output folder {out_dir} already holds data made with {name} {_short(made[name])}, not "
                          f"{_short(request[name])}; choose another folder or delete this one.")
    say(f"{out_dir} already holds this text and tokenizer; nothing to do")
    return out_dir


def _short(value: object) -> str:
    return f"sha256 {value[:12]}" if isinstance(value, str) and len(value) == 64 else str(value)


def _place_tokenizer(folder: Path, tokenizer: str, spec: tuple[str, int] | None, source: Source, contents: Contents,
                     valid: np.ndarray, say: Say) -> Path:
    """Train the tokenizer on training documents, or copy the given one, into `folder`."""
    if spec is None:
        return copy_tokenizer(Path(tokenizer), folder)
    chosen = sample_documents(contents.characters, contents.keys, ~valid)
    say(f"training   {tokenizer} on {chosen.sum():,} documents")
    # sentencepiece trains on one core without holding the interpreter; Megatron's slow import fits beside it.
    threading.Thread(target=load_builder, daemon=True).start()
    sample = (text[:DOCUMENT_CHARACTERS] for text in source.chosen_documents(chosen, contents.per_block))
    train_sentencepiece(sample, *spec, folder / "tokenizer.model")
    return folder / "tokenizer.model"


def encode_splits(folder: Path, model: Path, source: Source, contents: Contents, valid: np.ndarray, pool: Workers,
                  progress: bool) -> tuple[dict, float]:
    """Write both splits; return their counts and the validation split's unigram entropy in nats."""
    vocab_size = load_tokenizer(model).vocab_size
    encoded = pool.encode(source.blocks(), source.json_key, model, token_dtype(vocab_size))
    writers = {name: TokenWriter(folder / name, vocab_size) for name in SPLITS}
    first = 0
    for block in contents.same_blocks(_bar(encoded, "encoding", "block", progress, len(contents.per_block))):
        held_out = valid[first:first + len(block.lengths)]
        first += len(block.lengths)
        if not held_out.any():
            writers["train"].add(block.tokens, block.lengths)
            continue
        for name, chosen in (("train", ~held_out), ("valid", held_out)):
            writers[name].add(block.tokens[np.repeat(chosen, block.lengths)], block.lengths[chosen])
    for writer in writers.values():
        writer.finish()
    characters = {"train": contents.characters[~valid].sum(), "valid": contents.characters[valid].sum()}
    splits = {name: {"documents": writer.documents, "tokens": writer.tokens, "characters": int(characters[name])}
              for name, writer in writers.items()}
    return splits, writers["valid"].unigram_entropy()


def _write_metadata(folder: Path, text: list[str], source: Source, contents: Contents, request: dict, model: Path,
                    splits: dict, entropy: float) -> None:
    tokenizer = load_tokenizer(model)
    meta = {
        "format": FORMAT,
        "request": request,
        "text": {"given": text, "fingerprint": contents.fingerprint, "files": len(source.files),
                 "documents": len(contents.characters), "characters": int(contents.characters.sum()),
                 "one_document_per": source.one_document_per, "json_key": source.json_key},
        "tokenizer": {"fingerprint": tokenizer.fingerprint, "vocab_size": tokenizer.vocab_size,
                      "eod_id": tokenizer.eod_id, "eod_piece": tokenizer.eod_piece},
        "splits": splits,
        "valid_unigram_entropy": entropy,
        "versions": {name: version(name) for name in ("sentencepiece", "megatron-core", "numpy")},
    }
    (folder / METADATA).write_text(json.dumps(meta, indent=2) + "\n")


def _report(prepared: PreparedData, source: Source, say: Say) -> None:
    tokenizer: Tokenizer = load_tokenizer(prepared.tokenizer_path)
    say(f"tokenizer  vocabulary {tokenizer.vocab_size:,}, end of document {tokenizer.eod_id} {tokenizer.eod_piece!r}, "
        f"sha256 {tokenizer.fingerprint[:16]}")
    for name in SPLITS:
        counts = prepared.meta["splits"][name]
        say(f"{name:<10} {counts['documents']:,} documents, {counts['tokens']:,} tokens, {counts['characters']:,} "
            f"characters ({counts['characters'] / counts['tokens']:.2f} per token)")
    say(f"entropy    {prepared.valid_unigram_entropy:.3f} nats per token: the validation split's unigram distribution")
    sample = source.first_document().strip()[:60]
    ids = tokenizer.encode(sample)
    back = tokenizer.decode(ids)
    verdict = "and back, identical" if back == sample else f"and back as {back!r}: this tokenizer changes text"
    say(f"round trip {sample!r} to {len(ids)} tokens {verdict}")


def _bar(items: Iterable, name: str, unit: str, progress: bool, total: int | None = None) -> Iterator:
    """A progress bar on a terminal, else nothing."""
    return iter(tqdm(items, desc=name, unit=unit, total=total, leave=False, disable=None if progress else True))
