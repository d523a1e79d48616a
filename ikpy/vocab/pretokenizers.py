"""Pre-tokenizers of byte-level BPE: every ``tokenizer.ggml.pre`` name, its split rule and flags."""

from __future__ import annotations

from dataclasses import dataclass

from ikpy.errors import UnsupportedError


@dataclass(frozen=True)
class PreTokenizer:
    """What one ``tokenizer.ggml.pre`` name selects.

    ``rule`` names the split rule; ``ignore_merges``: a word that is a token is taken whole; ``add_bos``,
    ``add_sep``, ``clean_spaces`` are defaults for the vocabulary; ``has_default_bos`` is false when no BOS
    exists unless its id is given; ``needs_merges`` is false when the merge list may be absent.
    """

    rule: str
    ignore_merges: bool = False
    add_bos: bool = False
    add_sep: bool = False
    clean_spaces: bool = True
    has_default_bos: bool = True
    needs_merges: bool = True
    escape_spaces: bool = False


_ROWS: tuple[tuple[str, PreTokenizer], ...] = (
    ("default", PreTokenizer("DEFAULT")),
    (
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        PreTokenizer("LLAMA3", ignore_merges=True, add_bos=True),
    ),
    ("dbrx smaug-bpe", PreTokenizer("LLAMA3")),
    ("glm4 chatglm-bpe", PreTokenizer("LLAMA3", has_default_bos=False)),
    ("deepseek-llm", PreTokenizer("DEEPSEEK-LLM", clean_spaces=False)),
    ("deepseek-coder", PreTokenizer("DEEPSEEK-CODER", clean_spaces=False)),
    ("deepseek-v3 hunyuan-dense joyai-llm", PreTokenizer("DEEPSEEK3", clean_spaces=False)),
    ("youtu", PreTokenizer("YOUTU", ignore_merges=True, clean_spaces=False)),
    ("falcon", PreTokenizer("FALCON")),
    (
        "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert mpt olmo jais exaone4",
        PreTokenizer("GPT2"),
    ),
    ("jina-v1-en jina-v2-code roberta-bpe", PreTokenizer("GPT2", add_sep=True)),
    ("trillion granite-docling", PreTokenizer("GPT2", clean_spaces=False)),
    ("starcoder refact codeshell exaone minerva-7b mellum2", PreTokenizer("STARCODER")),
    ("command-r cohere2_moe smollm", PreTokenizer("STARCODER", clean_spaces=False)),
    (
        "qwen2 deepseek-r1-qwen kormo openpangu f2llmv2 hunyuan solar-open grok-2",
        PreTokenizer("QWEN2", clean_spaces=False),
    ),
    ("stablelm2 megrez", PreTokenizer("QWEN2")),
    ("laguna", PreTokenizer("LAGUNA", clean_spaces=False)),
    ("qwen35", PreTokenizer("QWEN35", clean_spaces=False)),
    ("poro-chat", PreTokenizer("BLOOM", clean_spaces=False)),
    ("bloom gpt3-finnish", PreTokenizer("BLOOM")),
    ("viking", PreTokenizer("VIKING", clean_spaces=False)),
    ("tekken", PreTokenizer("TEKKEN", ignore_merges=True, add_bos=True, clean_spaces=False)),
    ("chameleon", PreTokenizer("CHAMELEON", add_bos=True, clean_spaces=False)),
    ("gpt-4o llama4 kanana2 minimax-m2", PreTokenizer("GPT4O", clean_spaces=False)),
    ("tiny_aya", PreTokenizer("TINY-AYA", clean_spaces=False)),
    ("superbpe", PreTokenizer("SUPERBPE", clean_spaces=False)),
    ("bailingmoe bailingmoe2 llada-moe", PreTokenizer("BAILING", clean_spaces=False)),
    ("seed-coder", PreTokenizer("SEED-CODER", clean_spaces=False)),
    ("kimi-k2", PreTokenizer("KIMI-K2", clean_spaces=False, needs_merges=False)),
    ("afmoe", PreTokenizer("AFMOE", clean_spaces=False)),
    ("exaone-moe", PreTokenizer("EXAONE-MOE")),
    ("jais-2", PreTokenizer("JAIS2")),
    ("gemma4", PreTokenizer("GEMMA4", add_bos=True, has_default_bos=False, escape_spaces=True)),
)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {name: row for names, row in _ROWS for name in names.split()}


def pre_tokenizer(name: str) -> PreTokenizer:
    """Row of the table for a ``tokenizer.ggml.pre`` value; an unknown name raises UnsupportedError."""
    try:
        return PRE_TOKENIZERS[name]
    except KeyError:
        raise UnsupportedError(
            f"unknown pre-tokenizer type: '{name}' (key tokenizer.ggml.pre); "
            "override the key with the name of a tokenizer that splits alike"
        ) from None
