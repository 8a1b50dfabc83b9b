"""Global sample index -> tokens. One reader per format; `open_corpus` is the way in."""

from elastic_trainer.data.corpus import IGNORED, Corpus, CorpusMix, Samples, open_corpus
from elastic_trainer.data.source import DataError
from elastic_trainer.data.text import DOCUMENT_SEPARATOR
from elastic_trainer.data.tokenised import Crew

__all__ = [
    "DOCUMENT_SEPARATOR",
    "IGNORED",
    "Corpus",
    "CorpusMix",
    "Crew",
    "DataError",
    "Samples",
    "open_corpus",
]
