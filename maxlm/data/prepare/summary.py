"""Summary of a prepared data set for the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from maxlm.data.chat.packing import num_labeled
from maxlm.data.dataset.manifest_files import MANIFEST_NAME
from maxlm.data.dataset.records import DatasetManifest
from maxlm.data.filters.report import CleaningReport
from maxlm.data.formats.input_file import suffix_of
from maxlm.data.prepare.pipeline import CLEANING_FILE, VALIDATION_NOTE
from maxlm.data.tokenizer.text_boundaries import describe_boundaries
from maxlm.storage.filesystem import Entry, display_path
from maxlm.storage.regular_files import read_text

# Number of skipped documents that are printed. dataset.json lists all of them.
SKIPPED_SHOWN = 10
SUFFIXES_SHOWN = 5
# The loss on fewer documents that were held out says little about other documents.
FEW_DOCUMENTS = 10


def summary(dataset: DatasetManifest, message: str, *, cleaned: bool) -> list[str]:
    """Returns lines that describe a data set. The first line starts with `message`.

    With `cleaned`, the lines include the report of the filters.
    """
    lines = [f'{message}: vocabulary {dataset.vocab_size:,}, fingerprint {dataset.fingerprint[:12]}']
    for name, split in dataset.splits.items():
        if not split.documents:
            note = dataset.made_from.get(VALIDATION_NOTE)
            remedy = 'use --validation or a larger --validation-fraction'
            lines.append(
                f'  {name}: empty: {note}; add text or use --validation' if note else f'  {name}: empty; {remedy}'
            )
            continue
        what = 'documents'
        if dataset.preferences:
            what = 'answers with labels' if num_labeled(dataset.chat) else 'pairs'
        size = f'{split.text_bytes / split.tokens:.2f} bytes per token, ' if split.text_bytes else ''
        lines.append(
            f'  {name}: {split.documents:,} {what}, {split.tokens:,} tokens, {size}'
            f'unigram entropy {split.unigram_entropy:.3f} nats per token'
        )
        if name == 'validation' and VALIDATION_NOTE in dataset.made_from:
            lines.append(f'    {dataset.made_from[VALIDATION_NOTE]}')
        elif name == 'validation' and split.documents < FEW_DOCUMENTS and dataset.made_from.get('validation_share'):
            lines.append(f'    fewer than {FEW_DOCUMENTS} {what}, so the validation loss is a rough estimate; for more')
            lines[-1] += ', add text, raise --validation-fraction or use --validation'
        if len(split.sources) > 1:
            fractions = ', '.join(f'{source} {counts.share:.1%}' for source, counts in split.sources.items())
            lines.append(f'    {fractions}')
        if dataset.chat:
            lines.append(f'    {_chat_line(dataset.chat[name], split.tokens)}')
    if dataset.text_boundaries_sha256:
        tokens = describe_boundaries(dataset.load_tokenizer().boundary_names)
        lines += [f'  {label}: {text}' for label, text in tokens.items()]
    if dataset.chat and not dataset.packed_window:
        lines.append(
            '  not packed: training sequences begin and end inside conversations, so some answers lose their question; '
            'to keep conversations whole, prepare again with --pack-seq-len N (data.seq_len of training)'
        )
    if cleaned:
        path = dataset.path / CLEANING_FILE
        try:
            report = CleaningReport.from_json(read_text(path))
            lines += [f'  {line}' for line in report.to_lines()]
            lines.append(f'  examples: {path}')
        except (OSError, ValueError, LookupError, TypeError, AttributeError, ZeroDivisionError):
            # The data set is usable without the report.
            lines.append(f'  cleaning: {path} cannot be read; copy it again')
    if dataset.left_out:
        lines.append(f'  skipped: {len(dataset.left_out):,}, all listed in {dataset.path / MANIFEST_NAME}')
        # Most reasons begin with the name of the record.
        shown = [(entry['name'], entry['reason']) for entry in dataset.left_out[:SKIPPED_SHOWN]]
        lines += [f'    {name}: {reason.removeprefix(f"{name}: ")}' for name, reason in shown]
    return lines


def skipped_files(files: Sequence[Entry]) -> list[str]:
    """Returns a line about input files that contain no text; an empty list if there are no such files."""
    if not files:
        return []
    suffixes = Counter(suffix_of(entry.name) or 'no suffix' for entry in files).most_common(SUFFIXES_SHOWN)
    counts = ', '.join(f'{suffix} {count:,}' for suffix, count in suffixes)
    return [f'  skipped, not text: {len(files):,} files ({counts}), for example {display_path(files[0].path)}']


def _chat_line(counts: dict[str, int], tokens: int) -> str:
    parts = [f'{counts["predicted"] / tokens:.1%} of the tokens are trained on']
    if counts['padding']:
        parts.append(f'{counts["padding"] / tokens:.1%} are padding')
    if counts['shortened']:
        parts.append(f'{counts["shortened"]:,} conversations are longer than a sequence and are truncated after a turn')
    is_pairs = 'undecided' in counts
    if counts['left_out']:
        reason = 'they are longer than a sequence' if is_pairs else 'none of their turns fits'
        parts.append(f'{counts["left_out"]:,} {"pairs " if is_pairs else ""}are skipped because {reason}')
    if is_pairs and counts['undecided']:
        parts.append(f'{counts["undecided"]:,} pairs are skipped because their answers are equal or one is empty')
    return ', '.join(parts)
