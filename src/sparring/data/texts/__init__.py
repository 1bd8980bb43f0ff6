"""Texts of queries and items: their columns, tokenizers, token arrays, and pretrained encoders.

Trainable text towers are in sparring.models.
"""

from sparring.data.texts.encoder import TextEncoder
from sparring.data.texts.texts import Texts, find_texts, text_of, tokenize, tokenized
from sparring.data.texts.tokenizers import FastTokenizer, Tokenizer, WordTokenizer, find_tokenizer

__all__ = [
    "FastTokenizer",
    "TextEncoder",
    "Texts",
    "Tokenizer",
    "WordTokenizer",
    "find_texts",
    "find_tokenizer",
    "text_of",
    "tokenize",
    "tokenized",
]
