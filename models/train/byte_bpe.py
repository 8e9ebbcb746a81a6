"""The tokenizer of the shipped models: byte-level BPE with a token for padding, begin and end.

In: texts, and how they are cut into words. Out: transformers' fast tokenizer.

Easy to get wrong: the ids 0, 1 and 2 are the special tokens', which the models' configs name.
"""

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast


def trained(
    texts: Iterable[str], *, vocab_size: int, words: pre_tokenizers.PreTokenizer
) -> PreTrainedTokenizerFast:
    """A tokenizer of at most `vocab_size` tokens; `words` ends in the byte-level step."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = words
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<pad>", "<bos>", "<eos>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )
