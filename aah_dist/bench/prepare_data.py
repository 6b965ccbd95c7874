"""Throughput of prepare_data against sentencepiece's own batch encode: python -m aah_dist.bench.prepare_data

Both get the same number of processes. sentencepiece's: each process holds its share of the documents in memory as
strings and calls `encode(list, num_threads=1)`, 64 documents a call. Ours: everything from files to closed .bin/.idx
(read, decode, check, encode, join, split, write), with the first pass (counts, fingerprint, split), and without it.
Loading the tokenizer and starting processes come before the clock on both sides.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path

from aah_dist.bench.environment import describe
from aah_dist.data.corpus import documents, find_files
from aah_dist.data.prepare import encode_splits, prepare
from aah_dist.data.source import Contents, Source
from aah_dist.data.split import choose_valid
from aah_dist.data.workers import Workers

_CALL = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--copies", type=int, default=2, help="how often the standard library's source is repeated")
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each, taken in turn; the best is shown")
    parser.add_argument("--tokenizer", default="sentencepiece-unigram:4096", help="a trained sentencepiece tokenizer")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        prepared = prepare(["stdlib"], args.tokenizer, root / "prepared", valid_fraction=0.03, workers=2,
                           progress=False)
        model = prepared / "tokenizer.model"
        for copy in range(args.copies):
            for number, path in enumerate(find_files(["stdlib"])):
                target = root / "text" / str(copy) / f"{number}.py"
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(path.read_bytes() + b"# %d\n" % copy)
        source = Source.find([str(root / "text")], "file", "text")
        texts = [text for block in source.blocks() for text in documents(block, "text")]
        characters = sum(map(len, texts))
        _print_method(args, len(texts), characters)
        print("processes  sentencepiece  encode pass  ratio  both passes  ratio")
        for processes in args.processes:
            theirs, ours, whole = [], [], []
            for repeat in range(args.repeats):
                theirs.append(characters / _sentencepiece_seconds(texts, model, processes))
                scan, encode = _our_seconds(source, model, processes, root / f"out-{processes}-{repeat}")
                ours.append(characters / encode)
                whole.append(characters / (scan + encode))
            base, ours, whole = (max(values) / 1e6 for values in (theirs, ours, whole))
            print(f"{processes:>9}  {base:>13.2f}  {ours:>11.2f}  {ours / base:>5.2f}  {whole:>11.2f}  "
                  f"{whole / base:>5.2f}")


def _print_method(args: argparse.Namespace, count: int, characters: int) -> None:
    print(describe("sentencepiece", "numpy"))
    print(f"text      {count:,} documents, {characters:,} characters ({args.copies} copies of the standard library)")
    print(f"method    {args.tokenizer}; best of {args.repeats}, taken in turn; millions of characters per second")


def _our_seconds(source: Source, model: Path, processes: int, out: Path) -> tuple[float, float]:
    """Seconds of the first pass, and of the second with the finished files."""
    out.mkdir()
    with Workers(processes) as pool:
        pool.warm_up(model)
        start = time.perf_counter()
        contents = Contents.collect(pool.scan(source.blocks(), source.json_key, 0))
        valid = choose_valid(contents.characters, contents.keys, 0.03)
        middle = time.perf_counter()
        encode_splits(out, model, source, contents, valid, pool, progress=False)
        return middle - start, time.perf_counter() - middle


def _sentencepiece_seconds(texts: list[str], model: Path, processes: int) -> float:
    context = get_context("fork")
    ready = context.Barrier(processes + 1)
    # Round robin, so that every process gets the same mix of long and short documents.
    workers = [context.Process(target=_encode_share, args=(texts[i::processes], model, ready))
               for i in range(processes)]
    for worker in workers:
        worker.start()
    ready.wait()
    start = time.perf_counter()
    ready.wait()
    seconds = time.perf_counter() - start
    for worker in workers:
        worker.join()
    return seconds


def _encode_share(texts: list[str], model: Path, ready) -> None:
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    ready.wait()
    for start in range(0, len(texts), _CALL):
        processor.encode(texts[start:start + _CALL], num_threads=1)
    ready.wait()


if __name__ == "__main__":
    main()
