"""What training would see of the first documents: each token with its text, and whether it is learned."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from gemini.errors import printable
from gemini.jobs.finetune.checkpoint_directory import ModelDirectory
from gemini.jobs.finetune.config import FineTuneConfig
from gemini.jobs.finetune.encoding import EncodedDocument
from gemini.jobs.finetune.record_files import find_data
from gemini.jobs.finetune.record_kinds import Documents


def preview(config: FineTuneConfig) -> Iterator[str]:
    """Yield lines on the first ``config.show`` documents.

    Raises:
        ConfigError: model, tokenizer or data will not do.
    """
    model = ModelDirectory(config)
    seq, tokenizer = model.seq(), model.tokenizer()
    encoder = model.encoder(tokenizer)
    documents = Documents(find_data(config.data), data_format=config.data_format, keys=config.data_keys)
    for document in islice(documents, config.show):
        yield from _lines(tokenizer, encoder.encode(document), seq)
    if encoder.uses_plain_template:
        yield "the tokenizer has no chat template: this is the plain one (docs/finetune.md)"


def _lines(tokenizer: Any, encoded: EncodedDocument, seq: int) -> Iterator[str]:
    document, ids = encoded.document, encoded.ids
    learned = encoded.learned or [True] * len(ids)
    yield f"{document.place}: {document.kind}, {len(ids)} tokens, {sum(learned)} of them learned"
    yield f"{'':>6}  {'token':>7}  loss  text"
    for place, (token, is_learned) in enumerate(zip(ids[:seq], learned, strict=False)):
        text = printable(repr(tokenizer.decode([token])))
        yield f"{place:>6}  {token:>7}  {'yes' if is_learned else '-':<4}  {text}"
    if len(ids) > seq:
        yield f"        and {len(ids) - seq} more tokens, beyond --seq {seq}"
    yield ""
