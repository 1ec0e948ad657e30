"""Train the tokenizer of the embedded models: a byte-level BPE of 8192 entries.

    python tools/train_tokenizer.py [PATH ...] [--out engine/assets/tokenizer.json]

The text is the source of the running interpreter's standard library plus every file or folder
given: `.json`, `.jsonl` and `.traj` files give the strings inside them, `.md`, `.py`, `.rst` and
`.txt` files their text. The same text gives the same file, whatever the number of threads and the
order in which a disk lists its folders.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

from agentcache.engine.tiny.vocabulary import train_bpe

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tokenizers import Tokenizer

VOCAB_SIZE = 8192

# Longer runs (rulers of dashes, base64) would spend entries on one document.
MAX_TOKEN_CHARS = 24
# Shorter strings in trajectories are keys, ids and role names rather than text.
MIN_STRING_CHARS = 24

# Words take along one leading character that is no line break, so that " word", "_word" and ".word"
# are single pieces; digits stand in threes; line breaks end the indentation or punctuation before
# them; of several spaces the last one belongs to the word that follows.
SPLIT_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?\p{L}+"
    r"|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+"
)

TEXT_SUFFIXES = frozenset({".md", ".py", ".rst", ".txt"})
RECORD_SUFFIXES = frozenset({".json", ".jsonl", ".traj"})
SKIPPED_FOLDERS = frozenset({"__pycache__", "dist-packages", "site-packages", "test", "tests"})


def iter_files(root: Path) -> Iterator[Path]:
    """Every readable text or record file under `root` (or `root` itself), in a fixed order."""
    candidates = sorted(root.rglob("*")) if root.is_dir() else [root]
    for path in candidates:
        inside = path.relative_to(root).parts[:-1] if root.is_dir() else ()
        known = path.suffix in TEXT_SUFFIXES | RECORD_SUFFIXES
        if known and path.is_file() and SKIPPED_FOLDERS.isdisjoint(inside):
            yield path


def iter_strings(value: object) -> Iterator[str]:
    """Every string inside a JSON value that is long enough to be text; keys are left out."""
    if isinstance(value, str):
        if len(value) >= MIN_STRING_CHARS:
            yield value
    elif isinstance(value, list):
        for item in value:
            yield from iter_strings(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from iter_strings(item)


def iter_file_texts(path: Path) -> Iterator[str]:
    """The texts of one file; lines of a record file that are no JSON are left out."""
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix in TEXT_SUFFIXES:
        yield text
        return
    for record in [text] if path.suffix != ".jsonl" else text.splitlines():
        try:
            value = json.loads(record)
        except json.JSONDecodeError:
            continue
        yield from iter_strings(value)


def iter_corpus(roots: list[Path]) -> Iterator[str]:
    """All texts under `roots`, each distinct one once: step logs repeat their whole history."""
    seen: set[str] = set()
    for root in roots:
        for path in iter_files(root):
            for text in iter_file_texts(path):
                if text not in seen:
                    seen.add(text)
                    yield text


def train(texts: Iterator[str]) -> Tokenizer:
    """Train on `texts`."""
    return train_bpe(texts, size=VOCAB_SIZE, pattern=SPLIT_PATTERN, max_token_chars=MAX_TOKEN_CHARS)


def main() -> None:
    """Command line entry."""
    default_out = Path(__file__).resolve().parents[1] / "engine" / "assets" / "tokenizer.json"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("paths", nargs="*", type=Path, help="more text: files or folders")
    parser.add_argument("--out", type=Path, default=default_out)
    args = parser.parse_args()
    missing = [str(path) for path in args.paths if not path.exists()]
    if missing:
        parser.error(f"no such file or folder: {', '.join(missing)}")
    roots = [Path(sysconfig.get_paths()["stdlib"]), *args.paths]
    tokenizer = train(iter_corpus(roots))
    args.out.write_text(tokenizer.to_str(pretty=False) + "\n", encoding="utf-8")
    print(f"{args.out}: {tokenizer.get_vocab_size()} entries, {args.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
