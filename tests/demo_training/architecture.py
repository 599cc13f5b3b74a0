"""The shape of the demo model: a Llama of about four million parameters that two or four ranks can share."""

from transformers import GenerationConfig, LlamaConfig

from tests.demo_training.vocabulary import END_OF_TEXT, END_OF_TURN, SPECIAL_TOKENS, VOCABULARY_SIZE

MAX_POSITIONS = 2048
END_OF_TEXT_ID = SPECIAL_TOKENS.index(END_OF_TEXT)
END_OF_TURN_ID = SPECIAL_TOKENS.index(END_OF_TURN)


def llama_config() -> LlamaConfig:
    """Heads, KV heads and the MLP divide by four, so that tensor parallelism of 2 and 4 works."""
    return LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=5,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=END_OF_TURN_ID,
        pad_token_id=END_OF_TEXT_ID,
        initializer_range=0.02,
    )


def generation_config() -> GenerationConfig:
    """Greedy unless asked otherwise; a turn ends at the end of a turn or of a text."""
    return GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=False,
        eos_token_id=[END_OF_TURN_ID, END_OF_TEXT_ID],
        pad_token_id=END_OF_TEXT_ID,
        max_length=MAX_POSITIONS,
    )
