"""Make a folder of tokens out of text: python aah_dist/prepare_data.py [TEXT ...] [options]"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse  # noqa: E402
import os  # noqa: E402

from aah_dist.config.schema import ConfigError  # noqa: E402
from aah_dist.data.prepare import prepare  # noqa: E402

EXAMPLES = """examples:
  python aah_dist/prepare_data.py
      the source of the running Python's own standard library, to data/stdlib
  python aah_dist/prepare_data.py 'books/**/*.txt' x.txt.gz --output_dir data/books --tokenizer sentencepiece-bpe:8192
      own text, one document per file
  python aah_dist/prepare_data.py train.txt --valid_text valid.txt --output_dir data/wikitext2-gpt2 --tokenizer gpt2/
      a given split, encoded with a Hugging Face tokenizer folder (or GPT-2's vocab.json and merges.txt)
  python aah_dist/prepare_data.py crawl/ --json_key content --output_dir data/crawl --tokenizer llama.model
      a folder of .jsonl or .jsonl.gz files, encoded with an existing sentencepiece model
"""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="prepare_data.py", formatter_class=argparse.RawDescriptionHelpFormatter, epilog=EXAMPLES,
        description="Tokenize text into a folder that pretrain.py reads (--data.path): Megatron .bin/.idx files for "
                    "training and validation,\nthe tokenizer, and metadata.json with fingerprints and counts.")
    parser.add_argument("text", nargs="*", default=["stdlib"], metavar="TEXT",
                        help="files, folders, quoted globs (.gz and JSONL, .jsonl or .json, are known by name), or "
                             "stdlib (default: stdlib)")
    parser.add_argument("--output_dir", metavar="DIR", type=Path,
                        help="folder to make; it appears when it is complete (default for stdlib: data/stdlib)")
    parser.add_argument("--tokenizer", default="sentencepiece-bpe:1024", metavar="TOKENIZER",
                        help="sentencepiece-unigram:SIZE or sentencepiece-bpe:SIZE (trained on the text), a "
                             "sentencepiece .model file, or a Hugging Face tokenizer folder (default: %(default)s)")
    parser.add_argument("--one_document_per", choices=("file", "line"), default="file",
                        help="what a document is in plain text files (default: %(default)s)")
    parser.add_argument("--json_key", default="text", metavar="KEY",
                        help="where a line of a JSONL file holds its document (default: %(default)s)")
    parser.add_argument("--valid_fraction", type=float, default=0.03, metavar="F",
                        help="share of the text held out for validation, by whole documents (default: %(default)s)")
    parser.add_argument("--valid_text", nargs="+", metavar="TEXT",
                        help="hold out this text, given like TEXT, instead of a share of the text")
    parser.add_argument("--seed", type=int, default=0, metavar="N",
                        help="decides which documents are held out (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), metavar="N",
                        help="worker processes; the result does not depend on it (default: one per core, "
                             "here %(default)s)")
    args = parser.parse_args(arguments)
    try:
        if args.output_dir is None and args.text != ["stdlib"]:
            raise ConfigError("output_dir is not given; name a folder for your own text, for example "
                              "--output_dir data/mine.")
        prepare(args.text, args.tokenizer, args.output_dir or Path("data/stdlib"), valid_fraction=args.valid_fraction,
                seed=args.seed, workers=args.workers, json_key=args.json_key, one_document_per=args.one_document_per,
                valid_text=args.valid_text)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; nothing was left behind", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
