"""Makes what docs/finetuning.md fine-tunes: `python -m examples.make_chat FOLDER`.

FOLDER/base is a Qwen2.5 with random weights and a tokenizer, as transformers saves them;
FOLDER/chats.parquet and FOLDER/held-out.parquet have a column `messages`. Needs transformers and
pyarrow.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pyarrow as pa
import torch
from pyarrow import parquet
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

CAPITALS = {
    "Austria": "Vienna", "Chile": "Santiago", "Egypt": "Cairo", "France": "Paris",
    "Ghana": "Accra", "India": "New Delhi", "Japan": "Tokyo", "Norway": "Oslo",
}  # fmt: skip
QUESTIONS = (
    "What is the capital of {}?",
    "Which city is the capital of {}?",
    "Name the capital of {}.",
    "Tell me: what is {}'s capital?",
    "The capital of {}, please.",
    "I am off to {}. What is its capital?",
)
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Qwen2.5's, without its words for tools and for chats without a system message."""


def chats(questions: tuple[str, ...]) -> list[dict[str, object]]:
    """Return a chat for each question about each country."""
    return [
        {
            "messages": [
                {"role": "system", "content": "You are a helpful assistant."},
                {"role": "user", "content": question.format(country)},
                {"role": "assistant", "content": f"The capital of {country} is {city}."},
            ]
        }
        for question in questions
        for country, city in CAPITALS.items()
    ]


def tokenizer_of(texts: list[str]) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE with Qwen2.5's special tokens."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",  # noqa: S106  no password
        pad_token="<|endoftext|>",  # noqa: S106
        chat_template=TEMPLATE,
    )


def main(folder: Path) -> None:
    """Write base, chats.parquet and held-out.parquet into `folder`."""
    train, held_out = chats(QUESTIONS[:-1]), chats(QUESTIONS[-1:])
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("chats", train), ("held-out", held_out)):
        parquet.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet")
    tokenizer = tokenizer_of([str(chat) for chat in train])
    tokenizer.save_pretrained(folder / "base")
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=400,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,  # as the smaller Qwen2.5
        eos_token_id=tokenizer.eos_token_id,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder / "base")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
