"""The tokens of the tiny model, without torch.

MARKS, CHARACTERS     what its tokens are, in order
make_tiny_vocabulary  their ids, as its tokenizer writes them
"""

MARKS = ("<pad>", "<eos>", "<user>", "<agent>")
CHARACTERS = "\n" + "".join(map(chr, range(ord(" "), ord("~") + 1)))


def make_tiny_vocabulary() -> dict[str, int]:
    """Return the ids of the marks and of the characters, which byte-level BPE writes as symbols."""
    from tokenizers import pre_tokenizers

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    symbols = [byte_level.pre_tokenize_str(character)[0][0] for character in CHARACTERS]
    return {token: number for number, token in enumerate([*MARKS, *symbols])}
