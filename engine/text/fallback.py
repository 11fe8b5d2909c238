"""Chat templates for models that were trained to chat but came without one, by the tokens that their kind uses.

Whether a model was trained to chat, its files rarely say. It was if the token
that ends its answers is the one that ends a turn, or if its name says so; any
other model goes on with the text as it stands.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Fallback", "fallback_for"]

_CHAT_NAME = re.compile(r"(?:^|[-_. ])(?:chat|instruct|it|sft|dpo|rlhf|assistant)(?:$|[-_. \d])", re.IGNORECASE)
# A system message that has no place of its own goes before the first thing the user says.
_SYSTEM_FIRST = (
    "{% set system = messages[0].content ~ '\n\n' if messages[0].role == 'system' else '' %}"
    "{% for m in messages if m.role != 'system' %}{% set content = (system if loop.first else '') ~ m.content %}"
)


@dataclass(frozen=True, slots=True)
class Fallback:
    """A way to write conversations.

    name: for people. tokens: those it needs. end: the one that ends an answer. families: only for these, if any.
    """

    name: str
    tokens: tuple[str, ...]
    end: str
    template: str
    families: tuple[str, ...] = ()


def _by_roles(before: str, between: str, after: str) -> str:
    """Every message in the same frame around its role and content."""
    return (
        f"{{% for m in messages %}}{{{{ '{before}' ~ m.role ~ '{between}' ~ m.content ~ '{after}' }}}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{{{{ '{before}assistant{between}' }}}}{{% endif %}}"
    )


_FALLBACKS = (
    Fallback("ChatML", ("<|im_start|>", "<|im_end|>"), "<|im_end|>", _by_roles("<|im_start|>", "\n", "<|im_end|>\n")),
    Fallback(
        "Llama 3",
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|eot_id|>",
        "{{ bos_token }}" + _by_roles("<|start_header_id|>", "<|end_header_id|>\n\n", "<|eot_id|>"),
    ),
    Fallback(
        "Gemma",
        ("<start_of_turn>", "<end_of_turn>"),
        "<end_of_turn>",
        "{{ bos_token }}" + _SYSTEM_FIRST + "{% set role = 'model' if m.role == 'assistant' else 'user' %}"
        "{{ '<start_of_turn>' ~ role ~ '\n' ~ content ~ '<end_of_turn>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
    ),
    Fallback(
        "Granite",
        ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"),
        "<|end_of_text|>",
        _by_roles("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>\n"),
    ),
    Fallback(
        "GLM-4",
        ("[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|system|>"),
        "<|user|>",
        "[gMASK]<sop>{% for m in messages %}{{ '<|' ~ m.role ~ '|>\n' ~ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}",
    ),
    Fallback(
        "ChatGLM3",
        ("[gMASK]", "sop", "<|user|>", "<|assistant|>", "<|system|>"),
        "<|user|>",
        "[gMASK]sop{% for m in messages %}{{ '<|' ~ m.role ~ '|>\n ' ~ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}",
    ),
    Fallback(
        "Phi-3",
        ("<|user|>", "<|assistant|>", "<|end|>"),
        "<|end|>",
        _by_roles("<|", "|>\n", "<|end|>\n"),
    ),
    Fallback(
        "DeepSeek",
        ("<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
        "<｜end▁of▁sentence｜>",
        "{{ bos_token }}{% for m in messages %}"
        "{% if m.role == 'assistant' %}{{ '<｜Assistant｜>' ~ m.content ~ '<｜end▁of▁sentence｜>' }}"
        "{% elif m.role == 'system' %}{{ m.content }}{% else %}{{ '<｜User｜>' ~ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}",
    ),
    Fallback(
        "Cohere",
        ("<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>"),
        "<|END_OF_TURN_TOKEN|>",
        "{{ bos_token }}{% for m in messages %}{{ '<|START_OF_TURN_TOKEN|>' ~ ('<|CHATBOT_TOKEN|>' "
        "if m.role == 'assistant' else '<|SYSTEM_TOKEN|>' if m.role == 'system' else '<|USER_TOKEN|>') ~ m.content ~ "
        "'<|END_OF_TURN_TOKEN|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}",
    ),
    Fallback(
        "Mistral",
        ("[INST]", "[/INST]", "</s>"),
        "</s>",
        "{{ bos_token }}"
        + _SYSTEM_FIRST
        + "{% if m.role == 'assistant' %}{{ ' ' ~ content ~ '</s>' }}{% else %}{{ '[INST] ' ~ content ~ '[/INST]' }}"
        "{% endif %}{% endfor %}",
    ),
    Fallback(
        "Llama 2",
        ("<s>", "</s>"),
        "</s>",
        "{% set first = messages[0] %}"
        "{% set system = '<<SYS>>\n' ~ first.content ~ '\n<</SYS>>\n\n' if first.role == 'system' else '' %}"
        "{% for m in messages if m.role != 'system' %}{% if m.role == 'assistant' %}{{ ' ' ~ m.content ~ ' </s>' }}"
        "{% else %}{{ '<s>[INST] ' ~ (system if loop.first else '') ~ m.content ~ ' [/INST]' }}{% endif %}{% endfor %}",
        ("LlamaForCausalLM", "MistralForCausalLM"),
    ),
)
# These end any text, so that a model which knows one need not have been trained to chat.
_TEXT_ENDS = {"</s>", "<|end_of_text|>", "<｜end▁of▁sentence｜>"}


def fallback_for(
    name: str, family: str, has_token: Callable[[str], bool], is_end: Callable[[str], bool]
) -> Fallback | None:
    """The way of writing that suits a model without a chat template; None for one that was not trained to chat.

    name, family: of the model. has_token, is_end: whether its vocabulary has a token, and whether the model's files
    call a token the end of an answer.
    """
    named = _CHAT_NAME.search(name) is not None
    for fallback in _FALLBACKS:
        if all(map(has_token, fallback.tokens)) and (not fallback.families or family in fallback.families):
            ends_turn = is_end(fallback.end) and fallback.end not in _TEXT_ENDS
            return fallback if named or ends_turn else None
    return None
